"""Speed, smoothed loss and time left, from the records of the steps so far."""

from __future__ import annotations

import math
from collections import deque

from paceline.contract.records import StepRecord

WARM_UP_STEPS = 2
"""Steps at the start of a process that compile, allocate and fill caches: no measure of speed."""
WINDOW_SECONDS = 20.0
"""Rates cover the newest steps of about this long, so that they follow a change and do not flicker."""
WINDOW_STEPS = 20
"""... and at least this many steps, whatever they take."""
HORIZON_STEPS = 500
"""The time left is judged by this many steps: batches differ in length, and the next ones are like the last many."""


class Pace:
    """How a run is doing. ``first_step`` is 0, or the step that the run resumes after."""

    def __init__(self, first_step: int, total_steps: int) -> None:
        self.step, self.total_steps = first_step, total_steps
        self.num_skipped = 0
        self._seen = 0
        self._window: deque[StepRecord] = deque()
        self._window_seconds = 0.0
        self._losses: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS)
        self._horizon: deque[float] = deque(maxlen=HORIZON_STEPS)

    def add(self, record: StepRecord) -> None:
        """Take a step into account."""
        self.step = record.step
        self.num_skipped += record.skipped
        self._losses.append((record.loss, record.counted))
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return
        self._horizon.append(record.seconds)
        self._window.append(record)
        self._window_seconds += record.seconds
        while len(self._window) > WINDOW_STEPS and self._window_seconds - self._window[0].seconds > WINDOW_SECONDS:
            self._window_seconds -= self._window.popleft().seconds

    @property
    def loss(self) -> float:
        """Mean per label over the newest steps whose loss is finite; NaN when none is."""
        finite = [(loss, counted) for loss, counted in self._losses if math.isfinite(loss)]
        labels = sum(counted for _, counted in finite)
        return sum(loss * counted for loss, counted in finite) / labels if labels else math.nan

    @property
    def samples_per_second(self) -> float | None:
        """Over the window; None during the warm-up."""
        return self._per_second(sum(record.samples for record in self._window))

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens over the window; None during the warm-up and where samples have no tokens (images)."""
        if all(record.tokens == record.samples for record in self._window):
            return None
        return self._per_second(sum(record.tokens for record in self._window))

    @property
    def padding_share(self) -> float | None:
        """Share of computed token positions that held padding; None where samples have no tokens."""
        slots = sum(record.slots for record in self._window)
        if not slots or all(record.slots == record.samples for record in self._window):
            return None
        return 1 - sum(record.tokens for record in self._window) / slots

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, evaluations not included; None during the warm-up."""
        if not self._horizon:
            return None
        return sum(self._horizon) / len(self._horizon) * max(self.total_steps - self.step, 0)

    def _per_second(self, amount: int) -> float | None:
        return amount / self._window_seconds if self._window_seconds > 0 else None
