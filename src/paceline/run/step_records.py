"""Records of steps, made of numbers that leave the device when they are ready: no step waits for the one before it.

Where a loss or gradient is no number, they name the samples to blame, or that training has diverged.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import NonFiniteError
from paceline.contract.last_resort import GIVE_UP_SECONDS
from paceline.contract.records import MetricsRecord, Record, StepRecord
from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset
from paceline.prepare.assemble import Assembled
from paceline.run.progress import Progress, TrainSums, with_step
from paceline.seams import Ids, Size

Note = TypeVar("Note")


class Late(Generic[Note]):
    """A queue of device scalars, each with a note; they come out in order, at the latest on ``flush``.

    On CUDA the copy goes to pinned memory behind the work that makes the numbers, and an event tells when it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._waiting: deque[tuple[Note, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, note: Note, scalars: Sequence[Tensor]) -> None:
        """Queue scalars of any number format."""
        # every launch counts in a short step, so that numbers are only widened where one of them is
        wide = torch.float64 if any(scalar.dtype == torch.float64 for scalar in scalars) else torch.float32
        stacked = torch.stack([scalar.detach().to(wide) for scalar in scalars])
        if not self._cuda:
            self._waiting.append((note, stacked, None))
            return
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((note, host, event))

    def ready(self, most: int | None = None) -> Iterator[tuple[Note, list[float]]]:
        """Those that have arrived. Waits only while more than ``most`` are under way; None: never."""
        while self._waiting:
            note, values, event = self._waiting[0]
            if event is not None and not event.query():
                if most is None or len(self._waiting) <= most:
                    return
                event.synchronize()
            self._waiting.popleft()
            yield note, values.tolist()

    def flush(self) -> Iterator[tuple[Note, list[float]]]:
        """All of them, waiting as needed."""
        while self._waiting:
            note, values, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield note, values.tolist()


def not_finite(
    assembled: Assembled, dataset: Dataset, samples: Ids, *, step: int, epoch: int, loss: float, norm: float, lr: float
) -> NonFiniteError:
    """The error of a step whose update was not made.

    Args:
        samples: of the step. step: from 1. epoch: from 0.
        loss, norm: what was found; one of them is not finite.
        lr: the recipe's.
    """
    tried = [int(i) for i in samples]
    others = [int(i) for i in np.setdiff1d(dataset.splits["train"], samples)[:8]]
    # ranks see this at different steps, so that no pass may be run which needs all of them
    sharded = assembled.build.meets_in_forward
    bad = [] if sharded else [i for i in tried if not _is_fine(assembled, i)]
    # a model that is beyond repair fails on every sample
    rows_to_blame = bool(bad) and (not others or any(_is_fine(assembled, i) for i in others))
    named = bad if rows_to_blame else tried
    places = _places(dataset, named)
    what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    known = (
        "single samples cannot be tried where ranks meet in every pass"
        if sharded
        else "it is not single samples, so training has diverged"
    )
    return NonFiniteError(
        f"step {step} (epoch {epoch + 1}): {what}",
        f"{len(bad)} of its {len(tried)} samples give such a loss or gradient on their own: {places}"
        if rows_to_blame
        else f"{known}; those of the step: {places}",
        "look at these rows" if rows_to_blame else f"--set optimizer.lr={lr / 10:g}",
        step=step,
        epoch=epoch,
        sample_ids=named,
    )


def _places(dataset: Dataset, samples: Sequence[int]) -> str:
    return ", ".join(dataset.origins.of(i) for i in samples[:8]) + (" …" if len(samples) > 8 else "")


def _is_fine(assembled: Assembled, sample: int) -> bool:
    """Whether a sample alone gives a finite loss and finite gradients."""
    build = assembled.build
    build.model.eval()
    batch = build.layout.collate(np.array([sample]))
    loss = build.task.loss_sum(build.forward(build.model, batch), batch)
    parameters = [parameter for group in assembled.groups for parameter in group.parameters]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return all(bool(found.isfinite().all()) for found in (loss, *gradients) if found is not None)


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
