"""The loop: steps, evaluations, checkpoints, early stopping. Read engine/step.py first.

Everything that a resumed run needs is in ``Progress`` and the engine's state; the order of samples follows from
``Progress.order`` alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.background import Store
from paceline.data.dataset import Dataset
from paceline.data.order import OrderState, ShuffledOrder, StepPlan
from paceline.engine.assemble import Assembled
from paceline.engine.engine import Update
from paceline.engine.evaluate import evaluate
from paceline.engine.late import Late
from paceline.engine.rng import augmentation_seed
from paceline.engine.schedule import lr_factor
from paceline.engine.statistics import check_smallest
from paceline.engine.torch_engine import total
from paceline.errors import NonFiniteError, Preempted
from paceline.files import compiled_folder
from paceline.recipe import Recipe
from paceline.records import EvaluationRecord, Notice, Record, StepRecord
from paceline.seams import Batch, Ids, Size, World
from paceline.stop import Stop
from paceline.stopwatch import Stopwatch
from paceline.techniques.compile import note_kept
from paceline.techniques.fsdp import collected, is_sharded

MOST_SKIPPED = 50
"""fp16 loss scaling may skip this many steps in a row: enough for any scale to shrink from 65,536 to nothing."""


RUN_AHEAD = 32
"""Steps that the host may be ahead of the device: enough never to leave it idle, few enough to stop soon."""


PEAK_EVERY = 50
"""Steps between two looks at the peak of the device's memory."""

LOOKED_AHEAD = 2000
"""Steps among which the largest is looked for: on 8 ranks a fifth of a second at 32 texts a rank, 0.6 s at 128."""


@dataclass(frozen=True)
class TrainSums:
    """Training loss and accuracy since the last evaluation, from the training forward passes themselves."""

    loss: float = 0.0
    counted: int = 0
    correct: float = 0.0

    def plus(self, record: StepRecord) -> TrainSums:
        """The sums with one step more; a skipped step's loss may be infinite and is left out."""
        if record.skipped:
            return self
        return TrainSums(
            self.loss + record.loss * record.counted,
            self.counted + record.counted,
            self.correct + (record.correct or 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; plain data, saved with every checkpoint."""

    order: OrderState
    step: int = 0
    applied: int = 0
    skipped_in_a_row: int = 0
    best: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    sums: TrainSums = TrainSums()
    samples: int = 0
    tokens: int = 0
    slots: int = 0
    evaluations: tuple[EvaluationRecord, ...] = ()

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Progress:
        """The inverse of ``plain``."""
        evaluations = tuple(
            EvaluationRecord(**{**e, "confusion": e["confusion"] and tuple(map(tuple, e["confusion"]))})
            for e in plain["evaluations"]
        )
        nested = {"order": OrderState(**plain["order"]), "sums": TrainSums(**plain["sums"]), "evaluations": evaluations}
        return cls(**{**plain, **nested})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is made of; nothing in it changes while it runs, but the engine's weights."""

    recipe: Recipe
    dataset: Dataset
    assembled: Assembled
    order: ShuffledOrder
    steps_per_epoch: int
    total_steps: int
    evaluation_batch_size: int
    store: Store
    emit: Callable[[Record], None]
    stop: Stop
    watch: Stopwatch
    checkpoint_state: Mapping[str, Any]
    """Saved beside the progress: fingerprint and recipe, to compare on resume."""
    best_metric: str
    world: World
    """All ranks walk the same steps: what they decide by is the same on all of them, or asked of all."""


@dataclass(frozen=True)
class _StepNote:
    """What the host knows of a step whose numbers are still on the device."""

    step: int
    epoch: int
    samples: Ids
    size: Size
    counted: int
    seconds: float


@dataclass
class Loop:
    """Drives a job from a progress to its end.

    Args:
        job: what is run.
        progress: where it begins.
        saved_step: the step whose checkpoint is on the disk already.

    Raises:
        RecipeError: the model cannot be trained on a micro-batch of one sample, and one of the steps has such.

    Raises (from ``run``):
        Preempted: asked to stop; a checkpoint of the last whole step is on disk.
        NonFiniteError: loss or gradient is not finite; the weights still are.
        DiskFullError: no room for a checkpoint.
    """

    job: Job
    progress: Progress
    saved_step: int | None = None
    _late: Late[_StepNote] = field(init=False)
    _last_end: float = field(init=False)
    _peak: int | None = None

    def __post_init__(self) -> None:
        job, train = self.job, self.job.dataset.splits["train"]
        if job.recipe.model.train != "features":  # it makes no steps
            loop, total = job.recipe.loop, job.total_steps
            check_smallest(job.assembled.build, job.order, loop, train, total_steps=total, world_size=job.world.size)
        self._late = Late(job.assembled.build.device)
        self._last_end = time.perf_counter()

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ends the run here."""
        patience = self.job.recipe.loop.early_stopping
        return bool(patience and self.progress.evaluations_without_gain >= patience.patience)

    @property
    def ended(self) -> bool:
        """Whether no step is left to do."""
        return self.progress.step >= self.job.total_steps or self.stopped_early

    def run(self) -> Progress:
        """Train until the steps are done, early stopping ends it, or a signal asks to stop.

        What is due at a step bound is found from the progress alone: a run that goes on from any bound, also one
        whose evaluation was broken off, does the same as one that was never stopped.
        """
        job, every = self.job, self.job.recipe.loop
        if self.progress.step == 0 and (sudden := _sudden(job.recipe)):
            job.emit(Notice(message=sudden, level="warning"))
        if not self.ended:
            self._warm_up()
        while True:
            if self._due(every.evaluate_every) and not self._evaluated():
                self._evaluate()
            if self._asked_to_stop("train"):
                self._preempt()
            if self._due(every.checkpoint_every):
                self.save()
            if self.ended:
                break
            with job.watch.phase("train"):
                self._step()
            self._tell_committed()
        with job.watch.phase("train"):
            self._account(wait=True)
        self._see_saved()
        return self.progress

    def save(self, *, is_best: bool = False) -> None:
        """Have a checkpoint of this step saved beside the steps, unless there is one."""
        if self.saved_step == self.progress.step:
            return
        with self.job.watch.phase("train"):
            self._account(wait=True)
        with self.job.watch.phase("checkpoint"):
            self.job.assembled.engine.settle()
            tensors, state = self.job.assembled.engine.state()
            tensors = {stem: collected(named, self.job.world) for stem, named in tensors.items()}
            whole = {
                **self.job.checkpoint_state,
                "engine": state,
                "progress": self.progress.plain(),
                "seconds": self.job.watch.seconds(),
            }
            self.job.store.save(self.progress.step, tensors, whole, is_best=is_best)
            self.saved_step = self.progress.step
        self._tell_committed()
        self._last_end = time.perf_counter()

    def _tell_committed(self) -> None:
        for record in self.job.store.committed():
            self.job.emit(record)

    def _see_saved(self) -> None:
        """Wait until what was asked to be saved is on the disk."""
        with self.job.watch.phase("checkpoint"):
            self.job.store.wait()
        self._tell_committed()

    def _warm_up(self) -> None:
        """Compile, load kernels and record on the largest micro-batch: what will run out of memory does so now."""
        job, switches = self.job, self.job.recipe.techniques
        if not any(switch is True for switch in (switches.compile, switches.fusion, switches.capture)):
            return
        with job.watch.phase("compile"):
            ids = self._largest()
            job.assembled.engine.warm_up(job.assembled.build.layout.collate(ids), len(ids) or 1)
        compiled = job.recipe.techniques.compile is True and "compile" not in job.assembled.engine.path
        if compiled and job.assembled.build.device.type == "cuda":
            note_kept(job.assembled.build, compiled_folder())
        self._last_end = time.perf_counter()

    def _largest(self) -> Ids:
        """The micro-batch with the most positions among the next steps, up to an epoch and ``LOOKED_AHEAD``."""
        job, at = self.job, self.progress.order
        steps = min(job.total_steps - self.progress.step, job.steps_per_epoch, LOOKED_AHEAD)
        found = job.order.microbatches(at, steps, job.world.rank, job.world.size)
        return max(found, key=lambda ids: (len(ids), job.assembled.build.layout.size(ids).slots))

    def _step(self) -> None:
        job, at = self.job, self.progress.order
        plan = job.order.plan(at, job.world.rank, job.world.size)
        layout = job.assembled.build.layout
        counted = job.assembled.build.task.count(job.dataset.labels[plan.samples])
        engine = job.assembled.engine
        step = self.progress.step
        forward = engine.accumulate(
            (
                layout.collate(ids, augmentation_seed(job.recipe.seed, step, index, job.world.rank))
                for index, ids in enumerate(plan.microbatches)
            ),
            counted,
            step=step,
        )
        update = engine.update()
        after = job.order.after(at)
        if layout.reads_ahead and step + 1 < job.total_steps:
            layout.expect(job.order.plan(after, job.world.rank, job.world.size).microbatches)
        loss, correct = forward.loss, total(forward.extras)
        if job.world.size > 1:
            loss, correct = job.world.sum_(torch.stack([loss.float(), correct]))
        self._note(plan, loss, correct, update, counted)
        self.progress = replace(self.progress, step=step + 1, order=after)
        self._account(wait=False)

    def _note(self, plan: StepPlan, loss: torch.Tensor, correct: torch.Tensor, update: Update, counted: int) -> None:
        now, at, world = time.perf_counter(), self.progress, self.job.world
        # only the first rank tells of the step, so only it looks at the others' share
        pieces = self.job.order.of_all_ranks(at.order, world.size) if world.is_first else plan.microbatches
        sizes = [self.job.assembled.build.layout.size(ids) for ids in pieces]
        size = Size(len(plan.samples), sum(s.tokens for s in sizes), sum(s.slots for s in sizes))
        note = _StepNote(at.step + 1, at.order.epoch, plan.samples, size, counted, now - self._last_end)
        self._last_end = now
        self._late.push(note, (loss, update.norm, update.finite, correct))

    def _account(self, *, wait: bool) -> None:
        """Turn numbers that have arrived into records, and look whether they are numbers at all."""
        for note, (loss, norm, finite, correct) in self._late.flush() if wait else self._late.ready(RUN_AHEAD):
            record = self._record(note, loss, norm, bool(finite), correct)
            scaling = self.job.assembled.build.loss_scaling
            skipped_in_a_row = self.progress.skipped_in_a_row + 1 if record.skipped else 0
            if not (finite and math.isfinite(loss)) and (not scaling or skipped_in_a_row > MOST_SKIPPED):
                raise self._not_finite(note, loss, norm)
            self.progress = replace(
                self.progress,
                applied=self.progress.applied + bool(finite),
                skipped_in_a_row=skipped_in_a_row,
                sums=self.progress.sums.plus(record),
                samples=self.progress.samples + note.size.samples,
                tokens=self.progress.tokens + note.size.tokens,
                slots=self.progress.slots + note.size.slots,
            )
            self.job.watch.mark("first_update")  # the first one counts
            self.job.emit(record)

    def _record(self, note: _StepNote, loss: float, norm: float, finite: bool, correct: float) -> StepRecord:
        rates = self.job.assembled.rates
        return StepRecord(
            step=note.step,
            epoch=note.epoch,
            loss=loss,
            gradient_norm=norm,
            learning_rates=tuple(rates[min(self.progress.applied, len(rates) - 1)].tolist()),
            samples=note.size.samples,
            tokens=note.size.tokens,
            slots=note.size.slots,
            correct=None if self.job.dataset.kind == "regression" else correct,
            counted=note.counted,
            skipped=not finite,
            seconds=note.seconds,
            peak_bytes=self._peak_bytes(note.step),
        )

    def _peak_bytes(self, step: int) -> int | None:
        """Asked for now and then: it takes a sixth of a millisecond."""
        device = self.job.assembled.build.device
        if device.type == "cuda" and (self._peak is None or step % PEAK_EVERY == 0):
            self._peak = torch.cuda.max_memory_allocated(device)
        return self._peak

    def _evaluate(self) -> None:
        job = self.job
        with job.watch.phase("train"):
            self._account(wait=True)
        if "validation" not in job.dataset.splits:
            return
        with job.watch.phase("evaluate"), contextlib.suppress(_BrokenOff):
            job.assembled.engine.settle()
            found = evaluate(
                self._infer,
                job.assembled.build,
                "validation",
                job.dataset.splits["validation"],
                job.evaluation_batch_size,
                step=self.progress.step,
                epoch=max(0, math.ceil(self.progress.step / job.steps_per_epoch) - 1),
                world=job.world,
            )
            self._take_note(found)
        self._last_end = time.perf_counter()

    def _take_note(self, found: EvaluationRecord) -> None:
        found = replace(found, train_metrics=_train_metrics(self.progress.sums, self.job.dataset.kind))
        is_best = self._judge(found)
        self.saved_step = None  # a checkpoint of this step from before its evaluation is out of date
        self.job.emit(found)
        if is_best and self.job.recipe.loop.save_best:
            self.save(is_best=True)

    def _infer(self, batch: Batch) -> torch.Tensor:
        """Logits for an evaluation, which a stop breaks off: it may take minutes, and the resumed run does it again."""
        if self._asked_to_stop("evaluate"):
            raise _BrokenOff
        return self.job.assembled.engine.infer(batch)

    def _judge(self, found: EvaluationRecord) -> bool:
        """Take note of an evaluation; True when it is the best so far."""
        value = metric_value(found, self.job.best_metric)
        stopping = self.job.recipe.loop.early_stopping
        best = self.progress.best
        is_best = math.isfinite(value) and (best is None or value > best)
        gained = math.isfinite(value) and (best is None or value > best + (stopping.min_delta if stopping else 0.0))
        self.progress = replace(
            self.progress,
            sums=TrainSums(),
            best=value if is_best else best,
            best_step=self.progress.step if is_best else self.progress.best_step,
            evaluations_without_gain=0 if gained else self.progress.evaluations_without_gain + 1,
            evaluations=(*self.progress.evaluations, found),
        )
        return is_best

    def _asked_to_stop(self, phase: str) -> bool:
        """Whether any rank was sent a signal; all ranks ask at the same places, so that all stop at the same step."""
        with self.job.watch.phase(phase):
            return self.job.world.any(self.job.stop.requested_by is not None)

    def _preempt(self) -> None:
        world = self.job.world
        self.save()
        self._see_saved()
        with self.job.watch.phase("checkpoint"):
            # also holds everybody until the checkpoint is on the disk: no rank ends while another writes
            asked = world.gather(self.job.stop.requested_by)
        rank, signal_name = next((rank, name) for rank, name in enumerate(asked) if name)
        to = f" to rank {rank}" if asked.count(None) and world.size > 1 else ""
        at = f"after step {self.progress.step} of {self.job.total_steps}"
        raise Preempted(f"stopped by {signal_name}{to} {at}; a checkpoint is saved: {self.job.stop.then}")

    def _due(self, cadence: str | int) -> bool:
        """Whether what happens at a cadence happens at this step bound; at the end it does in any case."""
        at = self.progress
        if at.step == 0 or cadence == "never":
            return False
        return self.ended or (at.order.step == 0 if cadence == "epoch" else at.step % int(cadence) == 0)

    def _evaluated(self) -> bool:
        """Whether the evaluation of this step bound is already done."""
        return bool(self.progress.evaluations) and self.progress.evaluations[-1].step == self.progress.step

    def _not_finite(self, note: _StepNote, loss: float, norm: float) -> NonFiniteError:
        samples = [int(i) for i in note.samples]
        others = [int(i) for i in np.setdiff1d(self.job.dataset.splits["train"], note.samples)[:8]]
        # ranks see this at different steps, so that no pass may be run which needs all of them
        sharded = is_sharded(self.job.assembled.build.model)
        bad = [] if sharded else [i for i in samples if not self._is_fine(i)]
        # a model that is beyond repair fails on every sample
        rows_to_blame = bool(bad) and (not others or any(self._is_fine(i) for i in others))
        named = bad if rows_to_blame else samples
        places = ", ".join(self.job.dataset.origins.of(i) for i in named[:8]) + (" …" if len(named) > 8 else "")
        what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        lr = self.job.recipe.optimizer.lr
        known = (
            "single samples cannot be tried on sharded weights"
            if sharded
            else "it is not single samples, so training has diverged"
        )
        return NonFiniteError(
            f"step {note.step} (epoch {note.epoch + 1}): {what}",
            f"{len(bad)} of its {len(samples)} samples give such a loss or gradient on their own: {places}"
            if rows_to_blame
            else f"{known}; those of the step: {places}",
            "look at these rows" if rows_to_blame else f"--set optimizer.lr={lr / 10:g}",
            step=note.step,
            epoch=note.epoch,
            sample_ids=named,
        )

    def _is_fine(self, sample: int) -> bool:
        """Whether a sample alone gives a finite loss and finite gradients."""
        build = self.job.assembled.build
        build.model.eval()
        batch = build.layout.collate(np.array([sample]))
        loss = build.task.loss_sum(build.forward(build.model, batch), batch)
        parameters = [parameter for group in self.job.assembled.groups for parameter in group.parameters]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return all(bool(found.isfinite().all()) for found in (loss, *gradients) if found is not None)


class _BrokenOff(Exception):
    """A stop was asked for in the middle of an evaluation."""


def metric_value(found: EvaluationRecord, name: str) -> float:
    """The value of a metric such as ``accuracy`` or ``-loss``, higher is better."""
    sign, plain = (-1.0, name[1:]) if name.startswith("-") else (1.0, name)
    return sign * (found.loss if plain == "loss" else found.metrics[plain])


def _sudden(recipe: Recipe) -> str:
    """What is to be said of a learning rate that was scaled up and is reached in the first step; empty where neither.

    Goyal et al. 2017 found that a large batch diverges early at its scaled rate, and warm up for five epochs.
    """
    factor = lr_factor(recipe.optimizer, recipe.loop.batch_size)
    if factor <= 1 or recipe.schedule.warmup:
        return ""
    scaled = f"optimizer.lr_scaling multiplies the learning rate by {factor:.4g}, and schedule.warmup = 0"
    return f"{scaled}: the first steps take it in full and may diverge; --set schedule.warmup=0.06 leads up to it"


def _train_metrics(sums: TrainSums, kind: str) -> dict[str, float]:
    if not sums.counted:
        return {}
    loss = {"loss": sums.loss / sums.counted}
    return loss if kind == "regression" else {**loss, "accuracy": sums.correct / sums.counted}
