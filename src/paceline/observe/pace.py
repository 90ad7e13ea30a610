"""Speed, smoothed loss and time left, from the records of the steps so far."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from paceline.contract.records import EvaluationRecord, RunStarted, StepRecord

WARM_UP_STEPS = 2
"""Steps at the start of a process that compile, allocate and fill caches: no measure of speed."""
WINDOW_SECONDS = 20.0
"""Rates cover the newest steps of about this long, so that they follow a change and do not flicker."""
WINDOW_STEPS = 20
"""... and at least this many steps, whatever they take."""
HORIZON_STEPS = 500
"""The time left is judged by this many steps: batches differ in length, and the next ones are like the last many."""


@dataclass(frozen=True)
class Evaluations:
    """Evaluations that a run has before it.

    Args:
        every: steps from one to the next, and one at the end; 0: at the end alone.
        validation: samples of each.
        at_end: samples that are evaluated once more after the last step, those of the test split.
    """

    every: int = 0
    validation: int = 0
    at_end: int = 0

    @classmethod
    def of(cls, started: RunStarted) -> Evaluations:
        """Return those of a run that is about to begin."""
        cadence = started.recipe.get("loop", {}).get("evaluate_every", "epoch")
        every = {"epoch": started.steps_per_epoch, "never": 0}.get(cadence, cadence)
        validation, test = (started.samples.get(split, 0) for split in ("validation", "test"))
        # a threshold is tuned on validation, which is then measured by it
        tuned = 2 * validation if started.recipe.get("task", {}).get("threshold") == "tuned" else 0
        return cls(every=int(every), validation=validation, at_end=test + tuned)

    def ahead(self, step: int, total_steps: int, evaluated: int) -> tuple[int, int]:
        """Return how many are to come, and the samples of all of them.

        Args:
            step: the last that was made. evaluated: the newest step that was.
        """
        every = self.every or max(total_steps, 1)
        before = step - 1 if step > evaluated else step  # the evaluation of a step follows it
        passes = -(-total_steps // every) - before // every if self.validation and before < total_steps else 0
        return passes + (self.at_end > 0), passes * self.validation + self.at_end


_NONE = Evaluations()


class Pace:
    """Speed and progress of a run.

    Args:
        first_step: 0, or the step that the run resumes after.
        evaluations: those that the time left includes.
    """

    def __init__(self, first_step: int, total_steps: int, evaluations: Evaluations = _NONE) -> None:
        self.step, self.total_steps = first_step, total_steps
        self._evaluations, self._evaluated = evaluations, first_step
        self._sample_seconds: float | None = None
        """Seconds of a sample in the newest evaluation."""
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

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Take an evaluation into account."""
        self._evaluated = record.step
        if record.samples:
            self._sample_seconds = record.seconds / record.samples

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
        """Until the end, with the evaluations to come where the time of one is known; None during the warm-up."""
        if not self._horizon:
            return None
        training = sum(self._horizon) / len(self._horizon) * max(self.total_steps - self.step, 0)
        _, samples = self._evaluations.ahead(self.step, self.total_steps, self._evaluated)
        return training + samples * (self._sample_seconds or 0.0)

    @property
    def evaluations_not_counted(self) -> int:
        """Evaluations to come that ``seconds_left`` leaves out, for none has been measured."""
        passes, _ = self._evaluations.ahead(self.step, self.total_steps, self._evaluated)
        return passes if self._sample_seconds is None else 0

    def _per_second(self, amount: int) -> float | None:
        return amount / self._window_seconds if self._window_seconds > 0 else None
