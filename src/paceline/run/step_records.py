"""What is told of steps: numbers that leave the device when they are ready become records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from paceline.contract.last_resort import GIVE_UP_SECONDS
from paceline.contract.records import MetricsRecord, Record, StepRecord
from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset
from paceline.engine.late import Late
from paceline.prepare.assemble import Assembled
from paceline.run.not_finite import not_finite
from paceline.run.progress import Progress, TrainSums, with_step
from paceline.seams import Ids, Size

MOST_SKIPPED = 50
"""fp16 loss scaling may skip this many steps in a row: enough for any scale to shrink from 65,536 to nothing."""


RUN_AHEAD = 32
"""Steps that the host may be ahead of the device: enough never to leave it idle, few enough to stop soon."""


LAPS = 2
"""How many times as long as the longest step one may take; then it hangs."""


PEAK_EVERY = 50
"""Steps between two looks at the peak of the device's memory."""


@dataclass(frozen=True)
class StepNote:
    """What the host knows of a step whose numbers are still on the device."""

    step: int
    """From 1."""
    epoch: int
    samples: Ids
    size: Size
    counted: int
    """Labels."""
    seconds: float
    num_ranks: int = 0
    """Ranks of which each has its own loss among the numbers."""


@final
class StepRecords:
    """The steps of a run, told of in order.

    Args:
        assembled: what makes the steps.
        dataset: the samples to blame are looked for in.
        lr: the recipe's learning rate.
        metrics_every: steps over which loss and accuracy are told; None: they are not.
        watch: is told of the first update.
        emit: takes the records.
    """

    def __init__(
        self,
        assembled: Assembled,
        dataset: Dataset,
        *,
        lr: float,
        metrics_every: int | None = None,
        watch: Stopwatch,
        emit: Callable[[Record], None],
    ) -> None:
        self._assembled, self._dataset, self._lr = assembled, dataset, lr
        self._metrics_every = metrics_every
        self._running, self._running_steps = TrainSums(), 0
        self._watch, self._emit = watch, emit
        self._late: Late[StepNote] = Late(assembled.build.device)
        self._last_end = time.perf_counter()
        self._peak: int | None = None
        self._longest = 0.0

    def patience(self) -> float:
        """Seconds after which a step that is under way will not end any more: beyond all that were before it."""
        is_late = self._assembled.build.device.type != "cpu"
        return max(GIVE_UP_SECONDS, self._longest * (LAPS + RUN_AHEAD * is_late))

    def restart_clock(self) -> None:
        """The next step's seconds begin now: what came before belongs to no step."""
        self._last_end = time.perf_counter()

    def forget_peak(self) -> None:
        """The device's peak was reset."""
        self._peak = None

    def lap(self) -> float:
        """Seconds since the step before ended; this one ends now."""
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        self._longest = max(self._longest, seconds)
        return seconds

    def add(self, note: StepNote, numbers: Sequence[torch.Tensor]) -> None:
        """A step was made.

        Args:
            numbers: scalars on the device: loss, gradient norm, whether the update was made, right predictions; then
                the losses of ``note.num_ranks`` ranks; with fp16 also the loss scale, and the share of gradients that
                are 0 where it is counted.
        """
        self._late.push(note, numbers)

    def arrived(self, at: Progress) -> Progress:
        """Tell of steps whose numbers have arrived; returns the progress that counts them.

        Raises:
            NonFiniteError: loss or gradient norm is no number.
        """
        return self._told(at, self._late.ready(RUN_AHEAD))

    def rest(self, at: Progress) -> Progress:
        """``arrived``, once all numbers have."""
        return self._told(at, self._late.flush())

    def _told(self, at: Progress, arrived: Iterable[tuple[StepNote, list[float]]]) -> Progress:
        for note, (loss, norm, finite, correct, *more) in arrived:
            ranks, of_fp16 = more[: note.num_ranks], more[note.num_ranks :]
            record = self._record(note, at.applied, loss, norm, bool(finite), correct, *of_fp16)
            record = replace(record, rank_losses=tuple(ranks)) if ranks else record
            scaling = self._assembled.build.loss_scaling
            skipped_in_a_row = at.skipped_in_a_row + 1 if record.skipped else 0
            # a loss that is no number although its gradient is one: no scale is to blame
            is_overflow = scaling and record.skipped and skipped_in_a_row <= MOST_SKIPPED
            if not (finite and math.isfinite(loss)) and not is_overflow:
                where = {"step": note.step, "epoch": note.epoch}
                raise not_finite(
                    self._assembled, self._dataset, note.samples, **where, loss=loss, norm=norm, lr=self._lr
                )
            at = replace(
                at,
                applied=at.applied + bool(finite),
                skipped_in_a_row=skipped_in_a_row,
                scaling=with_step(at.scaling, record),
                sums=at.sums.plus(record),
                samples=at.samples + note.size.samples,
                tokens=at.tokens + note.size.tokens,
                slots=at.slots + note.size.slots,
            )
            self._watch.mark("first_update")  # the first one counts
            self._emit(record)
            if self._metrics_every is not None:
                self._run_on(record, self._metrics_every)
        return at

    def _run_on(self, record: StepRecord, every: int) -> None:
        """Add a step to the running loss and accuracy, and emit them where they are due."""
        self._running, self._running_steps = self._running.plus(record), self._running_steps + 1
        if record.step % every:
            return
        metrics = self._running.metrics(counts_right=self._assembled.build.task.counts_right)
        self._emit(MetricsRecord(step=record.step, epoch=record.epoch, steps=self._running_steps, metrics=metrics))
        self._running, self._running_steps = TrainSums(), 0

    def _record(
        self,
        note: StepNote,
        applied: int,
        loss: float,
        norm: float,
        finite: bool,
        correct: float,
        loss_scale: float | None = None,
        zero_share: float | None = None,
    ) -> StepRecord:
        rates = self._assembled.rates
        return StepRecord(
            step=note.step,
            epoch=note.epoch,
            loss=loss,
            gradient_norm=norm,
            learning_rates=tuple(rates[min(applied, len(rates) - 1)].tolist()),
            samples=note.size.samples,
            tokens=note.size.tokens,
            slots=note.size.slots,
            correct=correct if self._assembled.build.task.counts_right else None,
            counted=note.counted,
            skipped=not finite,
            seconds=note.seconds,
            peak_bytes=self._peak_bytes(note.step),
            loss_scale=loss_scale,
            zero_share=zero_share,
        )

    def _peak_bytes(self, step: int) -> int | None:
        """Asked for now and then: it takes a sixth of a millisecond."""
        device = self._assembled.build.device
        if device.type == "cuda" and (self._peak is None or step % PEAK_EVERY == 0):
            self._peak = torch.cuda.max_memory_allocated(device)
        return self._peak
