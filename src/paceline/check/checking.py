"""Goes through the claims, one after the other, for as long as there is time."""

from __future__ import annotations

import gc
import importlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paceline.check.claim import Broken, Claim, Finding, NotApplicable, Status, Untried
from paceline.check.subject import Subject
from paceline.contract.errors import PacelineError, first_line, in_a_line


def findings(
    claims: Sequence[Claim],
    subject: Subject,
    *,
    deadline: float | None = None,
    begins: Callable[[Claim], None] = lambda _: None,
) -> Iterator[Finding]:
    """What became of each claim, as it is known.

    A claim that has begun comes to its end; one whose turn comes after the deadline is left out.

    Args:
        deadline: on the clock of ``time.perf_counter``.
        begins: told which claim is next.
    """
    for number, claim in enumerate(claims):
        if deadline is not None and number and time.perf_counter() >= deadline:
            yield _found(claim, "left out", "no time was left for it")
            continue
        begins(claim)
        folder = subject.folder / claim.name
        folder.mkdir(exist_ok=True)
        yield _tried(claim, replace(subject, folder=folder))
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _tried(claim: Claim, subject: Subject) -> Finding:
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"):
            told = importlib.import_module(claim.module).check(subject)
        found = _found(claim, "passed", told)
    except NotApplicable as why:
        found = _found(claim, "not applicable", str(why))
    except Broken as error:
        found = replace(
            _found(claim, "failed", error.told),
            tensor=error.tensor,
            away=error.away,
            likely=claim.likely,
            switch=error.switch or claim.switch,
        )
    except torch.OutOfMemoryError:
        found = _found(claim, "not applicable", "memory ran out; --samples 8 takes less")
    except Untried as error:
        found = replace(_found(claim, "failed", f"it could not be tried: {error}"), switch=claim.switch)
    except Exception as error:
        found = replace(_found(claim, "failed", _raised(error)), switch=claim.switch)
    return replace(found, seconds=time.perf_counter() - began)


def _found(claim: Claim, status: Status, told: str) -> Finding:
    return Finding(claim=claim.name, says=claim.says, status=status, told=told)


def _raised(error: Exception) -> str:
    """What went wrong, and where, of an error that no claim looks for."""
    if isinstance(error, PacelineError):
        return f"it could not be tried: {first_line(error)}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"it could not be tried: {in_a_line(error)} ({Path(place.filename).name}:{place.lineno})"
