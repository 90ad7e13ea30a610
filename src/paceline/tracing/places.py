"""Where the host is at any moment: its innermost span, as far as it is one that budgets know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from paceline.tracing.chrome import Floats, Ints, Span, sums

UPDATE, STEP, OUTSIDE = "clip + update", "step", "outside"
"""The two spans of an update; in a step but in none of its parts; in no step."""

PLACES = ("data wait", "copy", "forward", "backward", "communicate", UPDATE, "evaluate", "checkpoint", STEP, OUTSIDE)

WHOLE = ("evaluate", "checkpoint")
"""Places that keep what is inside them: a forward pass of an evaluation is evaluation."""

_ROUNDED = 5e-9
"""Seconds by which a time may be off: traces have nanoseconds, in numbers that hold little more."""

_PLACE_OF_SPAN = {
    **{name: name for name in ("data wait", "copy", "forward", "backward", "communicate", *WHOLE)},
    "clip": UPDATE,
    "update": UPDATE,
    "step": STEP,
    "epoch": OUTSIDE,
}


@final
class Host:
    """The host's time line: its place at any moment."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self.begins, self.places = _places(spans)

    def at(self, moments: Floats) -> Ints:
        """The place at each moment, as a number of ``PLACES``."""
        found = np.searchsorted(self.begins, moments, side="right") - 1
        return np.where(found < 0, PLACES.index(OUTSIDE), self.places[np.maximum(found, 0)])

    def seconds(self, bounds: Floats) -> Floats:
        """What it spent at each place between each two bounds, [N, places]."""
        moments = np.unique(np.concatenate([self.begins, bounds]))
        moments = moments[(moments >= bounds[0]) & (moments <= bounds[-1])]
        num, between = len(bounds) - 1, np.searchsorted(bounds, moments[:-1], side="right") - 1
        code = between * len(PLACES) + self.at(moments[:-1])
        return sums(code, np.diff(moments), num * len(PLACES)).reshape(num, len(PLACES))

    def step_bounds(self, steps: range) -> tuple[list[float], float]:
        """When the host began each step, and when it was done with the last and what belongs to it."""
        own = [span for span in self._spans if span.name == "step" and span.step in steps]
        # a step that was made again, in smaller pieces, begins once
        first: dict[int, float] = {}
        for span in own:
            first.setdefault(span.step or 0, span.begin)
        end = max(span.end for span in own)
        later = (span.begin for span in self._spans if span.name == "step" and span.begin >= end)
        until = min(later, default=np.inf)
        # an evaluation or a checkpoint of the last step's is in the window where the window holds all of it
        after = [span.end for span in self._spans if span.name in WHOLE and end <= span.begin and span.end <= until]
        return [first[step] for step in steps], max([end, *after])


def _places(spans: Sequence[Span]) -> tuple[Floats, Ints]:
    """Moments from which the host is at a place, ascending, and those places; spans nest."""
    begins: list[float] = []
    places: list[int] = []
    open_spans: list[tuple[float, int]] = []

    def change(moment: float, place: int) -> None:
        begins.append(max(moment, begins[-1]) if begins else moment)
        places.append(place)

    def close_until(moment: float) -> None:
        while open_spans and open_spans[-1][0] <= moment + _ROUNDED:
            end, _ = open_spans.pop()
            change(end, open_spans[-1][1] if open_spans else PLACES.index(OUTSIDE))

    for span in spans:
        close_until(span.begin)
        around = open_spans[-1][1] if open_spans else PLACES.index(OUTSIDE)
        known = _PLACE_OF_SPAN.get(span.name)
        place = around if known is None or PLACES[around] in WHOLE else PLACES.index(known)
        # an inner span may seem to end after the one around it
        end = min(span.end, open_spans[-1][0]) if open_spans else span.end
        open_spans.append((end, place))
        change(span.begin, place)
    close_until(np.inf)
    return np.array(begins), np.array(places, dtype=np.int64)
