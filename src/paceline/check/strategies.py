"""Every strategy that this machine can run has the gradients of one rank."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.check.claim import Broken, NotApplicable
from paceline.check.ranks import compared
from paceline.check.subject import Subject
from paceline.contract.errors import UserError
from paceline.recipe.catalogue.strategies import AXES, STRATEGIES
from paceline.recipe.techniques import one_process


def check(subject: Subject) -> str:
    """An epoch on two ranks for each strategy and axis of the catalogue, beside one rank."""
    equal, others, furthest = list[str](), list[str](), 0.0
    for name, setting in strategies():
        if one_process(name):
            others.append(f"{name}: it is one process with several GPUs")
            continue
        try:
            _, away = compared(subject, (setting,))
        except NotApplicable as why:
            others.append(f"{name}: {why}")
        except UserError as error:
            others.append(f"{name}: {error.why or error.what}")
        except Broken as error:
            told = f"{name}: {error.told}"
            raise Broken(told, tensor=error.tensor, away=error.away, switch=_without(setting)) from None
        else:
            equal.append(name)
            furthest = max(furthest, away)
    if not equal:
        raise NotApplicable("; ".join(others))
    left = f"; not here: {'; '.join(others)}" if others else ""
    return f"{', '.join(equal)} on 2 ranks; the largest difference is {furthest:.1e} of a norm{left}"


def strategies() -> Iterator[tuple[str, str]]:
    """Name and setting of each strategy, and of each further axis of the mesh."""
    for entry in STRATEGIES:
        yield entry.name, f"parallel.strategy={entry.name}"
    for entry in AXES:
        yield entry.name, f"{entry.place}={entry.example}"


def _without(setting: str) -> str:
    field = setting.partition("=")[0]
    return f"--set {field}={'auto' if field == 'parallel.strategy' else 1}"
