"""A run as it is asked for, and as it is put together for the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.checkpoint.background import BackgroundStore, ElsewhereStore, Store
from paceline.checkpoint.store import Checkpoint, CheckpointStore
from paceline.data.dataset import Dataset, Tokens
from paceline.data.order import OrderState, ShuffledOrder, check_world
from paceline.engine.assemble import Assembled, assemble
from paceline.engine.statistics import fewest_together
from paceline.errors import CheckpointError, RecipeError
from paceline.facts import Facts
from paceline.preparation import Prepared
from paceline.progress import Progress
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.records import Decision, Record
from paceline.run_folder import RunFolder
from paceline.seams import Alone, World
from paceline.stop import Stop
from paceline.stopwatch import Stopwatch
from paceline.tasks import best_metric
from paceline.techniques.precision import summed_in
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
    world: World = field(default_factory=Alone)
    checkpoint: Checkpoint | None = None
    """Where a resumed run goes on."""
    named: frozenset[str] = frozenset()
    """Dotted paths that the user changed on purpose when resuming."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is made of; nothing in it changes while it runs, but the engine's weights, and ``on_oom``'s."""

    recipe: Recipe
    dataset: Dataset
    assembled: Assembled
    order: ShuffledOrder
    order_of: Callable[[Recipe], ShuffledOrder]
    """The order under a recipe with other micro-batches."""
    folder: RunFolder
    """Which the first rank holds, and alone writes into."""
    steps_per_epoch: int
    total_steps: int
    store: Store
    emit: Callable[[Record], None]
    stop: Stop
    watch: Stopwatch
    checkpoint_state: Mapping[str, Any]
    """Saved beside the progress: fingerprint and recipe, to compare on resume."""
    best_metric: str
    world: World
    """All ranks walk the same steps: what they decide by is the same on all of them, or asked of all."""
    recorder: WindowRecorder | None = None
    """Of the steps that are traced, where any are."""

    def keep(self, recipe: Recipe) -> None:
        """Have the run folder keep a recipe that is carried out in another way from now on."""
        if self.world.is_first:
            self.folder.write_recipe(recipe)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples of a forward pass that nothing is learned from."""
        return self.recipe.loop.evaluation_batch_size or self.recipe.loop.batch_size


def job_of(request: Request, prepared: Prepared, emit: Callable[[Record], None], stop: Stop) -> tuple[Job, Progress]:
    """The job and where it begins: at the start, or where the checkpoint left off."""
    recipe, dataset, loop, world = prepared.recipe, prepared.dataset, prepared.recipe.loop, request.world
    check_world(len(dataset.splits["train"]), world.size)
    order = _order(prepared, recipe)
    steps_per_epoch = order.steps_per_epoch(loop.batch_size)
    if steps_per_epoch == 0:
        raise RecipeError(
            f"loop.batch_size = {loop.batch_size}",
            f"with drop_last, {len(dataset.splits['train'])} training samples make no whole batch",
            f"--set loop.batch_size={len(dataset.splits['train'])} or loop.drop_last=false",
        )
    if loop.early_stopping and "validation" not in dataset.splits:
        raise RecipeError("loop.early_stopping: has no effect", "there is no validation split", "leave it out")
    total_steps = min(loop.max_steps or sys.maxsize, steps_per_epoch * loop.epochs)
    capturing = partial(request.watch.phase, "capture")
    dtype = summed_in(recipe.parallel, prepared.build.model)
    sums: dict[str, Any] = {"reduce_dtype": dtype, "bucket_mib": prepared.bucket_mib}
    assembled = assemble(recipe, prepared.build, total_steps, capturing=capturing, world=world, **sums)
    progress = Progress(order=OrderState(seed=recipe.seed, epoch=0, step=0, batch_size=loop.batch_size))
    if request.checkpoint is not None:
        progress = _restore(request.checkpoint, assembled, progress, steps_per_epoch)
        # the first rank may save, and drop this one, as soon as it goes on
        world.barrier("the checkpoint read")
    job = Job(
        recipe=recipe,
        dataset=dataset,
        assembled=assembled,
        order=order,
        order_of=partial(_order, prepared),
        folder=request.folder,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        store=BackgroundStore(CheckpointStore(request.folder.checkpoints, loop.keep_last), request.watch)
        if world.is_first
        else ElsewhereStore(),
        emit=emit,
        stop=stop,
        watch=request.watch,
        checkpoint_state={"fingerprint": dataset.fingerprint, "recipe": absolute(recipe).resolved()},
        best_metric=best_metric(prepared.build.task, loop.best_metric),
        world=world,
        recorder=recorder_for(
            recipe,
            prepared.build,
            dataset,
            assembled.engine,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            first_step=progress.step,
            folder=request.folder.path,
            world=world,
            tell=emit,
            watch=request.watch,
        ),
    )
    return job, progress


def _order(prepared: Prepared, recipe: Recipe) -> ShuffledOrder:
    dataset, loop = prepared.dataset, recipe.loop
    return ShuffledOrder(
        dataset.splits["train"],
        micro_batch_size=loop.micro_batch_size or loop.batch_size,
        shuffle=loop.shuffle,
        drop_last=loop.drop_last,
        lengths=dataset.inputs.lengths if isinstance(dataset.inputs, Tokens) else None,
        # alone, a sample may have no spread to be normalised by
        fewest=fewest_together(prepared.build.model),
    )


def _restore(checkpoint: Checkpoint, assembled: Assembled, fresh: Progress, steps_per_epoch: int) -> Progress:
    state = checkpoint.state
    assembled.engine.load({stem: checkpoint.tensors(stem) for stem in ("model", "optimizer")}, state["engine"])
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
