"""What is made again in smaller batches after it ran out of memory, and what of the job changes with that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision, EvaluationRecord, Notice
from paceline.contract.spans import activity
from paceline.engine.evaluate import Infer, evaluate
from paceline.memory.exhausted import SPLITTABLE
from paceline.memory.split import Result, evaluate_fitting, halved, largest_share, let_go, retried
from paceline.recipe.places import absolute
from paceline.run.job import Job
from paceline.seams import Meter, Retrying
from paceline.techniques.compile import forget_largest


@final
class Smaller:
    """A job, whose batches become smaller where memory does not suffice and the recipe has it so.

    Args:
        job: as it begins.
        begun_anew: told that work begins anew in smaller micro-batches.
    """

    def __init__(self, job: Job, begun_anew: Callable[[], None]) -> None:
        self.job = job
        """As it is by now."""
        self.decisions: tuple[Decision, ...] = ()
        """About what gave way, the last of each setting."""
        self._begun_anew = begun_anew

    def fitted(self, work: Callable[[], Result], *, step: int) -> Result:
        """What ``work`` returns, which asks for the job anew each time; a collective.

        Args:
            step: that is under way, from 1.
        """
        job, engine = self.job, self.job.assembled.engine
        if job.recipe.loop.on_oom == "fail" or not isinstance(engine, Retrying):
            with activity(SPLITTABLE):
                return work()
        return retried(work, engine, job.world, self._split, step=step, total_steps=job.course.total_steps)

    def evaluated(
        self, infer: Infer, split: str, *, step: int, epoch: int, meter: Callable[[], Meter] | None = None
    ) -> EvaluationRecord:
        """A split's record; a collective.

        Args:
            meter: makes those that take the place of the task's.
        """
        job = self.job
        given = infer, job.assembled.build, split, job.dataset.splits[split], job.recipe.loop.evaluated_together
        if job.recipe.loop.on_oom == "fail":
            with activity(SPLITTABLE):
                fresh = meter() if meter else None
                return evaluate(*given, step=step, epoch=epoch, world=job.mesh.data, meter=fresh)
        at: dict[str, Any] = {"step": step, "epoch": epoch, "meter": meter}
        return evaluate_fitting(*given, **at, world=job.mesh.data, split_to=self._evaluate_smaller)

    def judge_by(self, thresholds: Sequence[float]) -> None:
        """Measure predictions by these thresholds from now on."""
        build = self.job.assembled.build
        judged = replace(build, task=build.task.judged_by(thresholds))
        self.job = replace(self.job, assembled=replace(self.job.assembled, build=judged))

    def _split(self, why: str) -> bool:
        """Halve the micro-batch, alike on all ranks; False where it cannot be smaller."""
        job, num_samples = self.job, len(self.job.dataset.splits["train"])
        recipe = halved(job.recipe, num_samples, job.mesh.data.size)
        if recipe is None:
            return False
        course = job.course.under(recipe)
        try:
            course.check_smallest()
        except RecipeError:
            return False
        before, now = largest_share(job.recipe, num_samples, job.mesh.data.size), recipe.loop.micro_batch_size
        given = f"{why}: loop.micro_batch_size {before} -> {now}{' on every rank' if job.world.size > 1 else ''}"
        result = "samples, order and loss are the same, and dropout draws anew"
        job.emit(Notice(message=f"{given}, and it is made again; {result}", level="warning"))
        self._keep(f"loop.micro_batch_size={now}", reason=f"{before}: {why}", course=course)
        forget_largest(job.assembled.build.model)
        self._begun_anew()
        return True

    def _evaluate_smaller(self, size: int, told: str) -> None:
        self.job.emit(Notice(message=told, level="warning"))
        self._keep(f"loop.evaluation_batch_size={size}")

    def _keep(self, setting: str, *, reason: str = "out of memory", **changed: Any) -> None:
        """Put what has given way into the recipe, here and in the run folder, and ``changed`` into the job."""
        job, name = self.job, setting.partition("=")[0]
        recipe = job.recipe.with_settings([setting])
        others = tuple(decision for decision in self.decisions if decision.setting != name)
        self.decisions = (*others, Decision(setting=name, value=setting.partition("=")[2], reason=reason))
        state = {**job.checkpoint_state, "recipe": absolute(recipe).resolved()}
        self.job = replace(job, recipe=recipe, checkpoint_state=state, **changed)
        job.keep(recipe)


@contextlib.contextmanager
def kept_if_full(num_ranks: int, keep: Callable[[], None]) -> Iterator[None]:
    """Have the steps before an evaluation that runs out of memory saved by ``keep``: it can be done another time."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if num_ranks == 1:  # other ranks would still be in the evaluation
            let_go(error)
            keep()
        raise
