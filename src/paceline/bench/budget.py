"""What fits into a time: the longest cells are dropped first."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from paceline.bench.records import Record
from paceline.contract.errors import UserError, excerpt

SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}

SHARE = 0.9
"""Share of a budget that is planned; the rest is for what takes longer than it did before."""

FEWEST = 8
"""Steps below which a rate says little."""

WELL = 20
"""Steps up to which fewer repeats are given up first."""

T = TypeVar("T")


def parse_time(text: str, option: str) -> float:
    """Seconds of ``10m``, ``90s``, ``1h 30m`` or ``45``.

    Raises:
        UserError: it is no time.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|min|m|s|)(?=[\s\d]|$)", text.strip().lower())
    whole = re.fullmatch(r"(\s*\d+(\.\d+)?\s*(h|min|m|s)?)+", text.strip().lower())
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not whole or not seconds > 0:
        raise UserError(f"{option} {excerpt(text)}", "it is a time above 0, such as 90s, 2m or 1h 30m", f"{option} 10m")
    return seconds


def fit(cells: Sequence[T], seconds_of: Callable[[T], float], left: float, spared: Callable[[T], bool]) -> list[T]:
    """The cells that fit into ``left`` seconds, in their order.

    The longest is dropped first, of equal ones the last; those that are spared come last of all.
    """
    kept = list(cells)
    total = sum(map(seconds_of, kept))
    later_first = kept[::-1]  # of equally long ones, for sorting is stable
    for cell in sorted(later_first, key=lambda each: (spared(each), -seconds_of(each))):
        if total <= left:
            break
        kept = [each for each in kept if each is not cell]
        total -= seconds_of(cell)
    return kept


def expected_seconds(cell: Mapping[str, str], records: Iterable[Record], seconds: str = "whole_seconds") -> float:
    """What a cell will take: as long as it did before, else as most of its contender's, else as most do.

    Args:
        cell: the fields that a record of it has, ``contender`` among them.
        seconds: the field of the time.
    """
    known = [each for each in records if each.get(seconds)]
    own = [each[seconds] for each in known if all(each[name] == value for name, value in cell.items())]
    if own:
        return float(max(own))
    # not the longest: one rung that compiles would have all after it dropped
    alike = [each[seconds] for each in known if each["contender"] == cell["contender"]]
    return float(statistics.median(alike or [each[seconds] for each in known] or [0.0]))


def steps_that_fit(
    budget: float, *, rungs: int, repeats: int, whole_seconds: float, probed_steps: int, step_seconds: float
) -> tuple[int, int]:
    """Steps of a cell, and repeats, for which all rungs have their turn in ``budget`` seconds.

    Repeats are given up before there are fewer than ``WELL`` steps, and steps down to ``FEWEST``; what is then still
    too much is dropped by ``fit``.

    Args:
        whole_seconds: that the first rung took for ``probed_steps`` steps, from start to end.
        step_seconds: of one step.
    """
    fixed = max(0.0, whole_seconds - probed_steps * step_seconds)
    while True:
        share = SHARE * budget / (rungs * repeats)
        # a third of a step's time goes to what is held out, about a quarter as many rows
        steps = int((share - fixed) / (1.15 * step_seconds))
        if steps >= WELL or repeats == 1:
            return max(FEWEST, steps), repeats
        repeats -= 1
