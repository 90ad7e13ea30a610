"""A run as it is asked for, and as it is put together for the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.contract.errors import CheckpointError, RecipeError, RunFolderError
from paceline.contract.records import Decision, Record
from paceline.contract.stop import Stop
from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset
from paceline.data.order import check_world
from paceline.machine.facts import Facts
from paceline.prepare.assemble import Assembled, assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import Prepared
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.run.checkpoint.background import BackgroundStore, ElsewhereStore, Store
from paceline.run.checkpoint.mirror import Mirror
from paceline.run.checkpoint.store import Checkpoint, CheckpointStore
from paceline.run.progress import Progress
from paceline.run_folder import RunFolder
from paceline.seams import Mesh, World
from paceline.tasks import best_metric
from paceline.tracing.recorder import WindowRecorder
from paceline.tracing.set_up import recorder_for


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be run, already checked against this machine."""

    recipe: Recipe
    decisions: tuple[Decision, ...]
    facts: Facts
    folder: RunFolder
    rows: object | None
    """In-memory data in place of ``data.source``."""
    watch: Stopwatch
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks along the axes that split the run's work."""
    checkpoint: Checkpoint | None = None
    """Where a resumed run goes on."""
    named: frozenset[str] = frozenset()
    """Dotted paths that the user changed on purpose when resuming."""

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return self.mesh.whole


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is made of; nothing in it changes while it runs, but the engine's weights, and ``on_oom``'s."""

    recipe: Recipe
    dataset: Dataset
    assembled: Assembled
    course: Course
    folder: RunFolder
    """Which the first rank holds, and alone writes into."""
    store: Store
    emit: Callable[[Record], None]
    stop: Stop
    watch: Stopwatch
    checkpoint_state: Mapping[str, Any]
    """Saved beside the progress: fingerprint and recipe, to compare on resume."""
    best_metric: str
    world: World
    """All ranks walk the same steps: what they decide by is the same on all of them, or asked of all."""
    mesh: Mesh
    mirror: Mirror | None = None
    """Copies checkpoints elsewhere; of the first rank alone, where one is asked for."""
    recorder: WindowRecorder | None = None
    """Records the steps that are traced, where any are."""

    def keep(self, recipe: Recipe) -> None:
        """Have the run folder keep a recipe that is carried out in another way from now on."""
        if self.world.is_first:
            self.folder.write_recipe(recipe)

    def found_again(self) -> RunFolderError | None:
        """Have what the run still has saved where its folder is by now; None where that is where it was.

        A collective: all ranks get the same error.
        """
        lost = self.folder.find_again()
        if lost is not None:
            self.store.move(self.folder.checkpoints)
            if self.mirror is not None:
                self.mirror.move(self.folder.path)
            self.keep(self.recipe)
        told = self.world.share(lost and [lost.what, lost.why, lost.fix])
        return RunFolderError(*told) if told else None


def mirror_of(request: Request) -> Mirror | None:
    """Where checkpoints are copied to; every rank finds out whether that can be, and the first one has it.

    Raises:
        RecipeError: nothing can be written at such a URL.
    """
    url = request.recipe.loop.checkpoint_mirror
    mirror = Mirror(url, request.folder.path) if url else None
    return mirror if request.world.is_first else None


def job_of(request: Request, prepared: Prepared, emit: Callable[[Record], None], stop: Stop) -> tuple[Job, Progress]:
    """The job and where it begins: at the start, or where the checkpoint left off."""
    recipe, dataset, loop, world = prepared.recipe, prepared.dataset, prepared.recipe.loop, request.world
    check_world(len(dataset.splits["train"]), request.mesh.data.size)
    course = Course(recipe, dataset, prepared.build, request.mesh)
    if loop.early_stopping and "validation" not in dataset.splits:
        raise RecipeError("loop.early_stopping: has no effect", "there is no validation split", "leave it out")
    if recipe.saves == "best" and "validation" not in dataset.splits:
        raise RecipeError("loop.save = best", "there is no validation split to compare by", "--set loop.save=auto")
    assembled = assemble(
        recipe,
        prepared.build,
        course.total_steps,
        capturing=partial(request.watch.phase, "capture"),
        mesh=request.mesh,
        bucket_mib=prepared.bucket_mib,
    )
    progress = Progress(order=course.start)
    if request.checkpoint is not None:
        progress = _restore(request.checkpoint, assembled, progress, course.steps_per_epoch)
        # the first rank may save, and drop this one, as soon as it goes on
        world.barrier("the checkpoint read")
    job = Job(
        recipe=recipe,
        dataset=dataset,
        assembled=assembled,
        course=course,
        folder=request.folder,
        store=BackgroundStore(CheckpointStore(request.folder.checkpoints, loop.keep_last), request.watch)
        if world.is_first
        else ElsewhereStore(),
        emit=emit,
        stop=stop,
        watch=request.watch,
        checkpoint_state={"fingerprint": dataset.fingerprint, "recipe": absolute(recipe).resolved()},
        best_metric=best_metric(prepared.build.task, loop.best_metric),
        world=world,
        mesh=request.mesh,
        mirror=mirror_of(request),
        recorder=recorder_for(
            recipe,
            prepared.build,
            dataset,
            assembled.engine,
            total_steps=course.total_steps,
            steps_per_epoch=course.steps_per_epoch,
            first_step=progress.step,
            folder=request.folder.path,
            world=world,
            tell=emit,
            watch=request.watch,
        ),
    )
    return job, progress


def _restore(checkpoint: Checkpoint, assembled: Assembled, fresh: Progress, steps_per_epoch: int) -> Progress:
    state = checkpoint.state
    stems = ("model", "optimizer", *(["ema"] if "ema" in state["engine"] else []))
    assembled.engine.load({stem: checkpoint.tensors(stem) for stem in stems}, state["engine"])
    progress = Progress.parse(state["progress"])
    order = progress.order
    if order.batch_size != fresh.order.batch_size:
        raise CheckpointError(
            f"loop.batch_size = {fresh.order.batch_size}: the run was started with {order.batch_size}",
            "steps, schedule and the place in the data are counted in batches of that size",
            "start a new run, or change loop.micro_batch_size, which defines no result",
        )
    if order.step >= steps_per_epoch:  # fewer samples than before, named on purpose: that epoch is over
        order = replace(order, epoch=order.epoch + 1, step=0)
    return replace(progress, order=replace(order, seed=fresh.order.seed))
