"""The loop: steps, evaluations, checkpoints, early stopping. Read engine/step.py first.

Everything that a resumed run needs is in ``Progress`` and the engine's state; the order of samples follows from
``Progress.order`` alone.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from paceline.contract.errors import Preempted, RunFolderError
from paceline.contract.files import compiled_folder
from paceline.contract.records import Decision, EvaluationRecord, Notice
from paceline.contract.spans import mark, span
from paceline.contract.stop import NOT_BEGUN
from paceline.engine.compile_cache import note_kept
from paceline.engine.evaluate import Infer
from paceline.engine.torch_engine import total
from paceline.machine.device import is_gpu
from paceline.memory.split import check_split
from paceline.optim.schedule import lr_factor
from paceline.recipe import Recipe
from paceline.run.checkpoint.mirror import STOP_SECONDS
from paceline.run.due import Due
from paceline.run.job import Job
from paceline.run.progress import Progress
from paceline.run.scores import counted
from paceline.run.smaller import Smaller, kept_if_full
from paceline.run.step_records import StepNote, StepRecords
from paceline.run_folder import way_on
from paceline.seams import Accumulated, Batch, Size
from paceline.tasks.threshold import ThresholdMeter
from paceline.techniques.compile import start_workers
from paceline.tracing.recorder import WindowRecorder


class Loop:
    """Drives a job from a progress to its end.

    Args:
        job: what is run.
        progress: where it begins.
        saved_step: the step whose checkpoint is on the disk already.

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

    def __init__(self, job: Job, progress: Progress, *, saved_step: int | None = None) -> None:
        self.progress, self.saved_step = progress, saved_step
        self._saved_at = time.monotonic()
        check_split(job.recipe, job.course.strategy.why_not_retried())
        if job.recipe.model.train != "features":  # it makes no steps
            job.course.check_smallest()
        self._due = Due(job.recipe.loop, job.course.total_steps, job.best_metric)
        self._records = StepRecords(
            job.assembled,
            job.dataset,
            lr=job.recipe.optimizer.lr,
            metrics_every=job.recipe.observe.metrics_every,
            watch=job.watch,
            emit=job.emit,
        )
        self._smaller = Smaller(job, self._records.forget_peak)

    @property
    def job(self) -> Job:
        """What is run, as it is by now."""
        return self._smaller.job

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """About what gave way while it ran, the last of each setting."""
        return self._smaller.decisions

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ends the run here."""
        return self._due.stopped_early(self.progress)

    @property
    def ended(self) -> bool:
        """Whether no step is left to do."""
        return self._due.ended(self.progress)

    def run(self) -> Progress:
        """Train until the steps are done, early stopping ends it, or a signal asks to stop.

        What is due at a step bound is found from the progress alone: a run that goes on from any bound, also one
        whose evaluation was broken off, does the same as one that was never stopped.
        """
        job = self.job
        if self.progress.step == 0 and (sudden := _sudden(job.recipe)):
            job.emit(Notice(message=sudden, level="warning"))
        if not self.ended:
            self._warm_up()
        within: int | None = None
        with contextlib.ExitStack() as epoch:
            while True:
                with self._seen_through():
                    if self._due.evaluation(self.progress):
                        self._evaluate()
                    is_asked = self._asked_to_stop("train")
                if is_asked:
                    self._preempt()
                if self._due.checkpoint(self.progress) or self._asked_by_clock():
                    self.save()
                if self.ended:
                    break
                if within != self.progress.order.epoch:
                    within = self.progress.order.epoch
                    epoch.close()
                    epoch.enter_context(span("epoch", step=self.progress.step + 1))
                with self._seen_through():
                    if job.recorder is None:
                        with job.watch.phase("train"), span("step", step=self.progress.step + 1):
                            self._step()
                    else:
                        self._traced_step(job.recorder)
                self._tell_committed()
        with job.watch.phase("train"):
            self.progress = self._records.rest(self.progress)
        if job.recorder is not None:
            job.recorder.finish(self.progress.step, "the run stopped early" if self.stopped_early else "the run ended")
        self._see_saved()
        return self.progress

    def _traced_step(self, recorder: WindowRecorder) -> None:
        """A step of a run some of whose steps are traced."""
        at, step = self.progress.order, self.progress.step + 1
        if recorder.before_step(step):
            self._records.restart_clock()
        with self.job.watch.phase("train"), span("step", step=step):
            self._step()
        # on_oom: split may have changed the order's micro-batches by now
        if recorder.after_step(step, at.epoch, self.job.course.plan(at).microbatches):
            self._records.restart_clock()

    def save(self, *, is_best: bool = False) -> None:
        """Have a checkpoint of this step saved beside the steps, unless there is one."""
        if self.saved_step == self.progress.step:
            return
        with self.job.watch.phase("train"):
            self.progress = self._records.rest(self.progress)
        with self.job.watch.phase("checkpoint"), span("checkpoint"), self.job.stop.noted(), self._at_checkpoint():
            self.job.assembled.engine.settle()
            tensors, state = self.job.assembled.engine.state()
            whole = {
                **self.job.checkpoint_state,
                "engine": state,
                "progress": self.progress.plain(),
                "seconds": self.job.watch.seconds(),
            }
            self.job.store.save(self.progress.step, tensors, whole, is_best=is_best)
            self.saved_step, self._saved_at = self.progress.step, time.monotonic()
        self._tell_committed()
        self._records.restart_clock()

    def _tell_committed(self) -> None:
        if self.job.folder.is_gone:  # so a save may have failed: the next step bound sees to it
            return
        for record in self.job.store.committed():
            mark("checkpoint committed", step=record.step)
            self.job.emit(record)
            if self.job.mirror is not None:
                self.job.mirror.poke()
        if self.job.mirror is not None:
            self._tell_mirrored(self.job.mirror.notices())

    def _tell_mirrored(self, messages: list[str]) -> None:
        for message in messages:
            self.job.emit(Notice(message=message, level="warning"))

    def see_mirrored(self, seconds: float) -> None:
        """Wait until the newest checkpoint is where it is copied to, but not for longer."""
        if self.job.mirror is not None:
            self._tell_mirrored(self.job.mirror.wait(seconds))

    def _see_saved(self) -> None:
        """Wait until what was asked to be saved is on the disk."""
        with self.job.watch.phase("checkpoint"), self.job.stop.noted(), self._at_checkpoint():
            self.job.store.wait()
        self._tell_committed()

    def _at_checkpoint(self) -> AbstractContextManager[None]:
        """Inside, the disk may keep this rank waiting."""
        return self.job.world.at("saving a checkpoint")

    def _seen_through(self) -> AbstractContextManager[None]:
        """Inside, what a stop waits for: a step or the batch of an evaluation; not for one that hangs."""
        return self.job.stop.noted(self._records.patience)

    def _warm_up(self) -> None:
        """Compile, load kernels and capture on the largest micro-batch: what will run out of memory does so now."""
        job = self.job
        if not job.course.warms_up(job.assembled.build.device):
            return
        # a compilation takes minutes, or hangs without its workers, and the steps that are made are on the disk
        then = job.stop.then if self.progress.step else NOT_BEGUN
        with job.watch.compiling(), job.stop.at_once(then), warnings.catch_warnings():
            # torch's, of a backward pass that is broken off while it is traced: a page for what is no error
            warnings.filterwarnings("ignore", message="Error detected in ")
            if job.recipe.techniques.compile is True and is_gpu(job.assembled.build.device):
                start_workers()
            self._smaller.fitted(self._warmed_up, step=self.progress.step + 1)
        compiled = job.recipe.techniques.compile is True and "compile" not in job.assembled.engine.execution
        if compiled and job.assembled.build.device.type == "cuda":
            note_kept(job.assembled.build, compiled_folder())
        self._records.restart_clock()

    def _warmed_up(self) -> None:
        job, at = self.job, self.progress
        job.assembled.engine.warm_up(job.course.largest(at.order, at.step))

    def _step(self) -> None:
        at, step = self.progress.order, self.progress.step
        forward = self._smaller.fitted(self._accumulated, step=step + 1)
        job, layout = self.job, self.job.assembled.build.layout
        update = job.assembled.engine.update()
        after = job.course.after(at)
        if layout.reads_ahead and step + 1 < job.course.total_steps:
            layout.expect(job.course.plan(after).microbatches)
        loss, correct, ranks = forward.loss, total(forward.extras), list[torch.Tensor]()
        if job.mesh.data.size > 1:
            own = self._own_loss(loss) if job.recipe.observe.rank_losses else []
            loss, correct, *ranks = job.mesh.data.all_reduce(torch.stack([loss.float(), correct, *own]))
        scaling = [number for number in (update.loss_scale, update.zero_share) if number is not None]
        note = replace(self._note(), num_ranks=len(ranks))
        self._records.add(note, (loss, update.norm, update.finite, correct, *ranks, *scaling))
        self.progress = replace(self.progress, step=step + 1, order=after)
        self.progress = self._records.arrived(self.progress)

    def _own_loss(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the mean loss of this rank's samples in its place and 0 in every other's: their sum has all of them.

        Args:
            loss: this rank's part of the step's mean.
        """
        ranks, share = self.job.mesh.data, self.job.course.own_share(self.progress.order)
        mean = loss.float() / share if share else torch.full_like(loss, math.nan, dtype=torch.float32)
        return [mean if rank == ranks.rank else torch.zeros_like(mean) for rank in range(ranks.size)]

    def _accumulated(self) -> Accumulated:
        """The next step up to its update: what its forward passes gave."""
        return self.job.assembled.engine.accumulate(self.job.course.input(self.progress.order, self.progress.step))

    def _note(self) -> StepNote:
        seconds, at, course = self._records.lap(), self.progress, self.job.course
        plan = course.plan(at.order)
        counted = self.job.assembled.build.task.count(self.job.dataset.labels[plan.samples])
        # only the first rank tells of the step, so only it looks at the others' share
        pieces = course.of_all_ranks(at.order) if self.job.world.is_first else plan.microbatches
        sizes = [self.job.assembled.build.layout.size(ids) for ids in pieces]
        size = Size(len(plan.samples), sum(s.tokens for s in sizes), sum(s.slots for s in sizes))
        return StepNote(at.step + 1, at.order.epoch, plan.samples, size, counted, seconds)

    def _evaluate(self) -> None:
        job = self.job
        with job.watch.phase("train"):
            self.progress = self._records.rest(self.progress)
        if "validation" not in job.dataset.splits:
            return
        kept = kept_if_full(job.world.size, self._keep)
        with job.watch.phase("evaluate"), span("evaluate"), kept, contextlib.suppress(_BrokenOff):
            job.assembled.engine.settle()
            epoch = max(0, math.ceil(self.progress.step / job.course.steps_per_epoch) - 1)
            self._take_note(self.evaluated(self._infer, "validation", step=self.progress.step, epoch=epoch))
        self._records.restart_clock()

    def evaluated(self, infer: Infer, split: str, *, step: int, epoch: int, save: str = "") -> EvaluationRecord:
        """A split's record; in smaller batches where memory does not suffice and the recipe has it so. A collective.

        Where an average of the weights is kept, both are measured.

        Args:
            save: which of both count, see ``counted``; by default those that the recipe would save.
        """
        found = self._smaller.evaluated(infer, split, step=step, epoch=epoch)
        averaged = self.job.assembled.engine.averaged()
        if averaged is None:
            return found
        with averaged:
            average = self._smaller.evaluated(infer, split, step=step, epoch=epoch)
        return counted(found, average, save or self.job.recipe.saves, self.job.best_metric)

    def tune(self, infer: Infer, *, step: int, epoch: int) -> None:
        """Find the thresholds that suit validation best, and measure by them from now on. A collective."""
        build = self.job.assembled.build
        meter = partial(ThresholdMeter, build.device, build.task.probabilities)
        found = self._smaller.evaluated(infer, "validation", step=step, epoch=epoch, meter=meter)
        self._smaller.judge_by(tuple(found.metrics.values()))

    def _keep(self) -> None:
        self.save()
        self._see_saved()

    def _take_note(self, found: EvaluationRecord) -> None:
        found = replace(
            found,
            train_metrics=self.progress.sums.metrics(counts_right=self.job.assembled.build.task.counts_right),
            notices=(*found.notices, *filter(None, [self._due.notice(found)])),
        )
        self.progress, is_best = self._due.judged(self.progress, found)
        self.saved_step = None  # a checkpoint of this step from before its evaluation is out of date
        self.job.emit(found)
        if is_best and self.job.recipe.loop.save_best:
            self.save(is_best=True)

    def _infer(self, batch: Batch) -> torch.Tensor:
        """Logits for an evaluation, which a stop breaks off: it may take minutes, and the resumed run does it again."""
        if self._asked_to_stop("evaluate"):
            raise _BrokenOff
        return self.job.assembled.engine.infer(batch)

    def _asked_to_stop(self, phase: str) -> bool:
        """Whether any rank was sent a signal, or the run folder is gone; all ranks ask at the same places, so that all
        stop at the same step."""
        with self.job.watch.phase(phase):
            return self.job.world.any(self.job.stop.requested_by is not None or self.job.folder.is_gone)

    def _asked_by_clock(self) -> bool:
        """Whether the last checkpoint is too long ago: the first rank's clock decides, for no two are alike."""
        job = self.job
        if job.recipe.loop.checkpoint_minutes is None or self.progress.step == 0:
            return False
        with job.watch.phase("train"), self._seen_through():
            is_due = self._due.checkpoint_by_clock(time.monotonic() - self._saved_at)
            return job.world.any(job.world.is_first and is_due)

    def _preempt(self) -> None:
        world, recorder = self.job.world, self.job.recorder
        if recorder is not None:
            recorder.stop()
        lost = self.job.found_again()
        if lost is not None:
            self.saved_step = None
        self._keep()
        if recorder is not None and lost is None:  # a trace may take longer to write than whoever asked to stop waits
            recorder.finish(self.progress.step, "the run was stopped")
        with self.job.watch.phase("checkpoint"):
            self.see_mirrored(STOP_SECONDS)
            # also holds everybody until the checkpoint is on the disk: no rank ends while another writes
            asked = world.gather(self.job.stop.requested_by)
        if lost is not None:
            saved = f"{lost.why}; a checkpoint of step {self.progress.step} is saved in it"
            raise RunFolderError(lost.what, saved, world.share(way_on(self.job.folder.path)))
        rank, signal_name = next((rank, name) for rank, name in enumerate(asked) if name)
        to = f" to rank {rank}" if asked.count(None) and world.size > 1 else ""
        at = f"after step {self.progress.step} of {self.job.course.total_steps}"
        raise Preempted(f"stopped by {signal_name}{to} {at}; a checkpoint is saved: {self.job.stop.then}")


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
