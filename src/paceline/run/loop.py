"""The loop: steps, evaluations, checkpoints, early stopping. Read engine/step.py first.

Everything that a resumed run needs is in ``Progress`` and the engine's state; the order of samples follows from
``Progress.order`` alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.contract.errors import Preempted, RecipeError, RunFolderError
from paceline.contract.files import compiled_folder
from paceline.contract.records import Decision, EvaluationRecord, Notice, StepRecord
from paceline.contract.spans import mark, span
from paceline.engine.evaluate import Infer, evaluate
from paceline.engine.late import Late
from paceline.engine.torch_engine import total
from paceline.memory.split import Result, check_split, evaluate_fitting, halved, largest_share, let_go, retried
from paceline.optim.schedule import lr_factor
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.run.job import Job
from paceline.run.not_finite import not_finite
from paceline.run.progress import Progress, TrainSums, metric_value
from paceline.run_folder import way_on
from paceline.seams import Accumulated, Batch, Ids, Retrying, Size, StepInput, Update
from paceline.techniques.compile import forget_largest, note_kept
from paceline.tracing.recorder import WindowRecorder

MOST_SKIPPED = 50
"""fp16 loss scaling may skip this many steps in a row: enough for any scale to shrink from 65,536 to nothing."""


RUN_AHEAD = 32
"""Steps that the host may be ahead of the device: enough never to leave it idle, few enough to stop soon."""


PEAK_EVERY = 50
"""Steps between two looks at the peak of the device's memory."""


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
        decisions: about what gave way while it ran, the last of each setting.

    Raises:
        RecipeError: the model cannot be trained on a micro-batch of one sample, and one of the steps has such; or
            ``loop.on_oom: split`` can do nothing.

    Raises (from ``run``):
        Preempted: asked to stop; a checkpoint of the last whole step is on disk.
        RunFolderError: the run folder was removed or renamed; such a checkpoint is in it, or in a new one.
        NonFiniteError: loss or gradient is not finite; the weights still are.
        DiskFullError: no room for a checkpoint.
        torch.OutOfMemoryError: a step does not fit, and must not or cannot be made in smaller micro-batches.
    """

    job: Job
    progress: Progress
    saved_step: int | None = None
    decisions: tuple[Decision, ...] = ()
    _late: Late[_StepNote] = field(init=False)
    _last_end: float = field(init=False)
    _peak: int | None = None

    def __post_init__(self) -> None:
        job = self.job
        check_split(job.recipe, job.course.strategy.why_not_retried())
        if job.recipe.model.train != "features":  # it makes no steps
            job.course.check_smallest()
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
        return self.progress.step >= self.job.course.total_steps or self.stopped_early

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
        within: int | None = None
        with contextlib.ExitStack() as epoch:
            while True:
                if self._due(every.evaluate_every) and not self._evaluated():
                    self._evaluate()
                if self._asked_to_stop("train"):
                    self._preempt()
                if self._due(every.checkpoint_every):
                    self.save()
                if self.ended:
                    break
                if within != self.progress.order.epoch:
                    within = self.progress.order.epoch
                    epoch.close()
                    epoch.enter_context(span("epoch", step=self.progress.step + 1))
                if job.recorder is None:
                    with job.watch.phase("train"), span("step", step=self.progress.step + 1):
                        self._step()
                else:
                    self._recorded_step(job.recorder)
                self._tell_committed()
        with job.watch.phase("train"):
            self._account(wait=True)
        if job.recorder is not None:
            job.recorder.finish(self.progress.step, "the run stopped early" if self.stopped_early else "the run ended")
        self._see_saved()
        return self.progress

    def _recorded_step(self, recorder: WindowRecorder) -> None:
        """A step of a run some of whose steps are traced."""
        at, step = self.progress.order, self.progress.step + 1
        if recorder.before_step(step):
            self._last_end = time.perf_counter()
        with self.job.watch.phase("train"), span("step", step=step):
            self._step()
        # on_oom: split may have changed the order's micro-batches by now
        if recorder.after_step(step, at.epoch, self.job.course.plan(at).microbatches):
            self._last_end = time.perf_counter()

    def save(self, *, is_best: bool = False) -> None:
        """Have a checkpoint of this step saved beside the steps, unless there is one."""
        if self.saved_step == self.progress.step:
            return
        with self.job.watch.phase("train"):
            self._account(wait=True)
        with self.job.watch.phase("checkpoint"), span("checkpoint"):
            self.job.assembled.engine.settle()
            tensors, state = self.job.assembled.engine.state()
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
        if self.job.folder.is_gone:  # so a save may have failed: the next step bound sees to it
            return
        for record in self.job.store.committed():
            mark("checkpoint committed", step=record.step)
            self.job.emit(record)

    def _see_saved(self) -> None:
        """Wait until what was asked to be saved is on the disk."""
        with self.job.watch.phase("checkpoint"):
            self.job.store.wait()
        self._tell_committed()

    def _warm_up(self) -> None:
        """Compile, load kernels and capture on the largest micro-batch: what will run out of memory does so now."""
        job = self.job
        if not job.course.warms_up(job.assembled.build.device):
            return
        with job.watch.compiling():
            self._fitted(self._warmed_up)
        compiled = job.recipe.techniques.compile is True and "compile" not in job.assembled.engine.execution
        if compiled and job.assembled.build.device.type == "cuda":
            note_kept(job.assembled.build, compiled_folder())
        self._last_end = time.perf_counter()

    def _warmed_up(self) -> None:
        job, at = self.job, self.progress
        job.assembled.engine.warm_up(job.course.largest(at.order, at.step))

    def _fitted(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns; in smaller micro-batches where it runs out of memory and the recipe has it so."""
        job, engine = self.job, self.job.assembled.engine
        if job.recipe.loop.on_oom == "fail" or not isinstance(engine, Retrying):
            return work()
        step, total_steps = self.progress.step + 1, job.course.total_steps
        return retried(work, engine, job.world, self._split, step=step, total_steps=total_steps)

    def _split(self, why: str) -> bool:
        """Halve the micro-batch, alike on all ranks; False where it cannot be smaller."""
        job, num_samples = self.job, len(self.job.dataset.splits["train"])
        recipe = halved(job.recipe, num_samples, job.world.size)
        if recipe is None:
            return False
        course = job.course.under(recipe)
        try:
            course.check_smallest()
        except RecipeError:
            return False
        before, now = largest_share(job.recipe, num_samples, job.world.size), recipe.loop.micro_batch_size
        given = f"{why}: loop.micro_batch_size {before} -> {now}{' on every rank' if job.world.size > 1 else ''}"
        result = "samples, order and loss are the same, and dropout draws anew"
        job.emit(Notice(message=f"{given}, and it is made again; {result}", level="warning"))
        self._keep_smaller(f"loop.micro_batch_size={now}", reason=f"{before}: {why}", course=course)
        forget_largest(job.assembled.build.model)
        self._peak = None
        return True

    def _keep_smaller(self, setting: str, *, reason: str = "out of memory", **changed: Any) -> None:
        """Put what has given way into the recipe, here and in the run folder, and ``changed`` into the job."""
        job, name = self.job, setting.partition("=")[0]
        recipe = job.recipe.with_settings([setting])
        others = tuple(decision for decision in self.decisions if decision.setting != name)
        self.decisions = (*others, Decision(setting=name, value=setting.partition("=")[2], reason=reason))
        state = {**job.checkpoint_state, "recipe": absolute(recipe).resolved()}
        self.job = replace(job, recipe=recipe, checkpoint_state=state, **changed)
        job.keep(recipe)

    def _step(self) -> None:
        at, step = self.progress.order, self.progress.step
        given, forward = self._fitted(self._accumulated)
        job, layout = self.job, self.job.assembled.build.layout
        update = job.assembled.engine.update()
        after = job.course.after(at)
        if layout.reads_ahead and step + 1 < job.course.total_steps:
            layout.expect(job.course.plan(after).microbatches)
        loss, correct = forward.loss, total(forward.extras)
        if job.mesh.data.size > 1:
            loss, correct = job.mesh.data.all_reduce(torch.stack([loss.float(), correct]))
        self._note(loss, correct, update, int(given.denominator))
        self.progress = replace(self.progress, step=step + 1, order=after)
        self._account(wait=False)

    def _accumulated(self) -> tuple[StepInput, Accumulated]:
        """The next step up to its update: what the engine was given, and what its forward passes gave."""
        given = self.job.course.input(self.progress.order, self.progress.step)
        return given, self.job.assembled.engine.accumulate(given)

    def _note(self, loss: torch.Tensor, correct: torch.Tensor, update: Update, counted: int) -> None:
        now, at, course = time.perf_counter(), self.progress, self.job.course
        plan = course.plan(at.order)
        # only the first rank tells of the step, so only it looks at the others' share
        pieces = course.of_all_ranks(at.order) if self.job.world.is_first else plan.microbatches
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
            # a loss that is no number although its gradient is one: no scale is to blame
            is_overflow = scaling and record.skipped and skipped_in_a_row <= MOST_SKIPPED
            if not (finite and math.isfinite(loss)) and not is_overflow:
                at, job = {"step": note.step, "epoch": note.epoch}, self.job
                lr = job.recipe.optimizer.lr
                raise not_finite(job.assembled, job.dataset, note.samples, **at, loss=loss, norm=norm, lr=lr)
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
        with job.watch.phase("evaluate"), span("evaluate"), self._kept_if_full(), contextlib.suppress(_BrokenOff):
            job.assembled.engine.settle()
            epoch = max(0, math.ceil(self.progress.step / job.course.steps_per_epoch) - 1)
            self._take_note(self.evaluated(self._infer, "validation", step=self.progress.step, epoch=epoch))
        self._last_end = time.perf_counter()

    def evaluated(self, infer: Infer, split: str, *, step: int, epoch: int) -> EvaluationRecord:
        """A split's record; in smaller batches where memory does not suffice and the recipe has it so. A collective."""
        job = self.job
        given = infer, job.assembled.build, split, job.dataset.splits[split], job.evaluation_batch_size
        if job.recipe.loop.on_oom == "fail":
            return evaluate(*given, step=step, epoch=epoch, world=job.mesh.data)
        return evaluate_fitting(*given, step=step, epoch=epoch, world=job.mesh.data, split_to=self._evaluate_smaller)

    def _evaluate_smaller(self, size: int, told: str) -> None:
        self.job.emit(Notice(message=told, level="warning"))
        self._keep_smaller(f"loop.evaluation_batch_size={size}")

    @contextlib.contextmanager
    def _kept_if_full(self) -> Iterator[None]:
        """Save the steps before an evaluation that runs out of memory: it can be done another time."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.job.world.size == 1:  # other ranks would still be in the evaluation
                let_go(error)
                self.save()
                self._see_saved()
            raise

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
        """Whether any rank was sent a signal, or the run folder is gone; all ranks ask at the same places, so that all
        stop at the same step."""
        with self.job.watch.phase(phase):
            return self.job.world.any(self.job.stop.requested_by is not None or self.job.folder.is_gone)

    def _found_again(self) -> RunFolderError | None:
        """Have what the run still has saved where its folder is by now; None where that is where it was."""
        job = self.job
        lost = job.folder.find_again()
        if lost is not None:
            job.store.move(job.folder.checkpoints)
            job.keep(job.recipe)
        if told := job.world.share(lost and [lost.what, lost.why, lost.fix]):
            self.saved_step = None
            return RunFolderError(*told)
        return None

    def _preempt(self) -> None:
        world, recorder = self.job.world, self.job.recorder
        if recorder is not None:
            recorder.stop()
        lost = self._found_again()
        self.save()
        self._see_saved()
        if recorder is not None and lost is None:  # a trace may take longer to write than whoever asked to stop waits
            recorder.finish(self.progress.step, "the run was stopped")
        with self.job.watch.phase("checkpoint"):
            # also holds everybody until the checkpoint is on the disk: no rank ends while another writes
            asked = world.gather(self.job.stop.requested_by)
        if lost is not None:
            saved = f"{lost.why}; a checkpoint of step {self.progress.step} is saved in it"
            raise RunFolderError(lost.what, saved, world.share(way_on(self.job.folder.path)))
        rank, signal_name = next((rank, name) for rank, name in enumerate(asked) if name)
        to = f" to rank {rank}" if asked.count(None) and world.size > 1 else ""
        at = f"after step {self.progress.step} of {self.job.course.total_steps}"
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


class _BrokenOff(Exception):
    """A stop was asked for in the middle of an evaluation."""


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
