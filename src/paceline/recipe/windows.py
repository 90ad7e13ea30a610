"""Trace windows as a person writes them, and as steps of a run: ``90:100``, ``last-epoch:-10``.

Steps are cut as Python cuts a list, the list being the run's steps: ``90:100`` leaves out the first 90 and ends with
the 100th, so that it is steps 91 to 100 as the run counts them, from 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.contract.errors import RecipeError

LAST_EPOCH = "last-epoch"

_RANGE = re.compile(r"(\d{1,12}):(\d{1,12})")
_LAST_OF_EPOCH = re.compile(rf"{LAST_EPOCH}(?::-(\d{{1,12}}))?")

FORMS = "90:100 (steps 91 to 100), last-epoch:-10 (the last ten of the last epoch) or last-epoch"


@dataclass(frozen=True)
class StepWindow:
    """Steps of a run that are traced together, from 1, both ends included."""

    first: int
    last: int
    asked: str
    """As the recipe has it; several that overlap are one window, with commas between them."""

    @property
    def name(self) -> str:
        """The name of its folder: ``steps-91-100``."""
        return f"steps-{self.first}-{self.last}"

    @property
    def told(self) -> str:
        """For people."""
        return f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    def __len__(self) -> int:
        return self.last - self.first + 1


def problem_of(text: object) -> str:
    """Why ``text`` is no window; empty where it is one."""
    if isinstance(text, int):
        return f"{text} is no window: {text - 1}:{text} is step {text}" if text > 0 else f"{text} is no window"
    if not isinstance(text, str):
        return f"{text!r} is no window: {FORMS}"
    if text.isdecimal():
        return problem_of(int(text))
    if of_epoch := _LAST_OF_EPOCH.fullmatch(text):
        return f"{text} holds no step" if of_epoch[1] and not int(of_epoch[1]) else ""
    found = _RANGE.fullmatch(text)
    if not found:
        return f"{text!r} is no window: {FORMS}"
    if int(found[2]) <= int(found[1]):
        return f"{text} holds no step: it ends where it begins, or before"
    return ""


def step_windows(asked: Sequence[str], total_steps: int, steps_per_epoch: int) -> tuple[StepWindow, ...]:
    """The windows of a run, in order; those that overlap are one, since a profiler cannot run inside itself.

    Raises:
        RecipeError: a window reaches beyond the run.
    """
    found = sorted((_placed(text, total_steps, steps_per_epoch) for text in asked), key=lambda w: (w.first, -w.last))
    merged = found[:1]
    for window in found[1:]:
        before = merged[-1]
        if window.first > before.last:
            merged.append(window)
        else:
            last = max(before.last, window.last)
            merged[-1] = StepWindow(before.first, last, f"{before.asked}, {window.asked}")
    assert all(one.last < other.first for one, other in pairwise(merged))
    return tuple(merged)


def _placed(text: str, total_steps: int, steps_per_epoch: int) -> StepWindow:
    if of_epoch := _LAST_OF_EPOCH.fullmatch(text):
        begin = (total_steps - 1) // steps_per_epoch * steps_per_epoch
        # of a shorter epoch all, as Python's slices have it
        count = int(of_epoch[1]) if of_epoch[1] else total_steps
        return StepWindow(max(begin, total_steps - count) + 1, total_steps, text)
    bounds = _RANGE.fullmatch(text)
    assert bounds, text
    begin, end = int(bounds[1]), int(bounds[2])
    if end > total_steps:
        steps = f"{total_steps:,} step{'s' if total_steps != 1 else ''}"
        never = "opens" if begin >= total_steps else "ends"
        raise RecipeError(
            f"trace.steps = {text}: beyond the run",
            f"it has {steps}, so that the window never {never}",
            f"--set trace.steps=[{max(0, total_steps - (end - begin))}:{total_steps}]",
        )
    return StepWindow(begin + 1, end, text)
