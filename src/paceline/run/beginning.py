"""Before the first step: what a resume changes, what is written and what is told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import torch

from paceline.contract.errors import CheckpointError
from paceline.contract.records import DataRecord, Notice, Observer, RunStarted
from paceline.data.describe import described
from paceline.data.overflow import Overflow
from paceline.memory.beside import PlanBeside
from paceline.models.config import max_positions
from paceline.observe.console import console_observer
from paceline.observe.metrics_file import MetricsFile
from paceline.optim.ema import first_in_average
from paceline.prepare.preparation import Prepared, size_of_vocabulary
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.run.checkpoint.compare import differences, refuse_changes
from paceline.run.checkpoint.mirror import SETTING
from paceline.run.emitter import Emitter
from paceline.run.job import Job, Request
from paceline.run.loop import Loop
from paceline.run.progress import Progress
from paceline.run_folder import RunFolder, way_to_more
from paceline.techniques.precision import WEIGHTS, rounded_away


def changes(request: Request, prepared: Prepared) -> tuple[list[str], list[str]]:
    """What a resumed run does differently, as text: in what it learns, all of it named on purpose; in how it runs.

    Compared is the recipe that the checkpoint was trained with, so that an edited recipe.yaml is noticed too.

    Raises:
        CheckpointError: it would learn something else, and nobody asked for that.
    """
    if request.checkpoint is None:
        return [], []
    saved, fingerprint = request.checkpoint.state, prepared.dataset.fingerprint
    before, now = (absolute(recipe).resolved() for recipe in (Recipe.parse(saved["recipe"]), prepared.recipe))
    defining, execution = differences(before, now)
    refuse_changes(defining, request.named, old_data=saved["fingerprint"], new_data=fingerprint)
    learned = [str(change) for change in defining]
    if saved["fingerprint"] != fingerprint:
        learned.append(f"data (its content): {saved['fingerprint'][:16]} -> {fingerprint[:16]}")
    return learned, [str(change) for change in execution]


def measures_otherwise(request: Request, prepared: Prepared) -> str:
    """What a resumed run measures with that it did not before the checkpoint; empty where all is as it was."""
    if request.checkpoint is None:
        return ""
    saved, recipe = Recipe.parse(request.checkpoint.state["recipe"]), prepared.recipe
    changed = {
        "the data": request.checkpoint.state["fingerprint"] != prepared.dataset.fingerprint,
        "the task": saved.task.model_dump() != recipe.task.model_dump(),
        "loop.best_metric": saved.loop.best_metric != recipe.loop.best_metric,
        "what is saved (loop.save, optimizer.ema)": (saved.saves, saved.optimizer.ema is None)
        != (recipe.saves, recipe.optimizer.ema is None),
    }
    return " and ".join(name for name, is_other in changed.items() if is_other)


def refuse_finished(request: Request, loop: Loop) -> None:
    """A run that has its summary has nothing to go on with, unless a setting made it longer."""
    if loop.ended and request.folder.summary.exists():
        early = loop.stopped_early
        raise CheckpointError(
            f"{request.folder.path}: the run {'was stopped early at' if early else 'is at'} step {loop.progress.step}"
            + ("" if early else ", its end"),
            "nothing is left to resume",
            way_to_more(loop.job.recipe, stopped_early=early),
        )


def begin(
    request: Request,
    prepared: Prepared,
    loop: Loop,
    changed: Sequence[str],
    emitter: Emitter,
    beside: PlanBeside | None,
    stack: contextlib.ExitStack,
) -> None:
    """Write what the run folder holds from its start, open the observers and tell them of it.

    Args:
        changed: what is done differently from before the resume.
        beside: predicts the run's memory as it begins.
        stack: closes the observers.
    """
    job = loop.job
    with request.watch.phase("start"):
        if request.world.is_first:
            _write_start(request, prepared, changed)
            emitter.pass_on_to(_observers(stack, request.folder, prepared.recipe, beside))
        job.emit(_started(request, prepared, job, loop.progress))
        if job.mirror is not None:
            # a resumed run's setting may have come with a folder of somebody else's
            asked = request.checkpoint is None or not request.named.isdisjoint({"loop", SETTING})
            job.mirror.begin(may_begin=asked)
        for notice in _first_notices(request, prepared, job):
            job.emit(notice)
        if job.recorder is not None:
            job.recorder.announce()


def _write_start(request: Request, prepared: Prepared, changes: Sequence[str]) -> None:
    folder, recipe = request.folder, prepared.recipe
    first_step = request.checkpoint.step if request.checkpoint else 0
    evaluations = request.checkpoint.state["progress"]["evaluations"] if request.checkpoint else ()
    folder.write_recipe(recipe)
    folder.write_manifest(
        command=sys.argv,
        hardware=request.facts.plain(),
        data_fingerprint=prepared.dataset.fingerprint,
        seeds={"seed": recipe.seed, "data.splits.seed": recipe.data.splits.seed},
        first_step=first_step,
        changes=changes,
        num_ranks=request.world.size,
    )
    folder.truncate_metrics(first_step, {(found["split"], found["step"]) for found in evaluations})
    for ended in (folder.summary, folder.preempted):  # they are of a run that has ended, and this one goes on
        ended.unlink(missing_ok=True)


def _observers(
    stack: contextlib.ExitStack, folder: RunFolder, recipe: Recipe, beside: PlanBeside | None
) -> list[Observer]:
    """Open every observer; they are closed with the stack, also when the run fails."""
    watchers: list[Observer] = [
        MetricsFile(folder.metrics),
        console_observer(recipe.observe.console, recipe.observe.log_every),
    ]
    if recipe.observe.tensorboard:
        from paceline.observe.tensorboard import TensorBoard

        watchers.append(TensorBoard(folder.path / "tensorboard"))
    if beside is not None:
        watchers.append(beside)
    for watcher in watchers:
        stack.callback(watcher.close)
    return watchers


def _first_notices(request: Request, prepared: Prepared, job: Job) -> list[Notice]:
    found = [Notice(message=message) for message in prepared.dataset.notices]
    found += [Notice(message=message, level="warning") for message in prepared.build.notices]
    num_samples, batch_size = len(prepared.dataset.splits["train"]), prepared.recipe.loop.batch_size
    if num_samples < batch_size:
        few = f"{num_samples:,} training samples are fewer than loop.batch_size = {batch_size:,}: an epoch is one step"
        found.append(Notice(message=few))
    narrow = prepared.recipe.techniques.precision in WEIGHTS and prepared.recipe.model.train != "features"
    if narrow and (lost := rounded_away(prepared.recipe.optimizer)):
        found.append(Notice(message=lost, level="warning"))
    average = prepared.recipe.optimizer.ema
    if average is not None and (stale := first_in_average(average, job.course.total_steps)):
        found.append(Notice(message=stale, level="warning"))
    if request.checkpoint:
        found += [Notice(message=message, level="warning") for message in request.checkpoint.notices]
    if otherwise := measures_otherwise(request, prepared):
        anew = f"{otherwise} changed: the best step is looked for anew, and what was measured before does not count"
        found.append(Notice(message=anew, level="warning"))
    return found


def _started(request: Request, prepared: Prepared, job: Job, progress: Progress) -> RunStarted:
    is_gpu = prepared.recipe.device == "cuda"
    device = request.facts.gpus[0].name if is_gpu else f"cpu ({torch.get_num_threads()} threads)"
    return RunStarted(
        name=prepared.recipe.name,
        folder=str(request.folder.path),
        device=device if request.world.size == 1 else f"{request.world.size} x {device}",
        recipe=prepared.recipe.resolved(),
        decisions=prepared.decisions,
        num_parameters=prepared.num_parameters,
        num_trained_parameters=prepared.num_trained,
        samples={name: len(ids) for name, ids in prepared.dataset.splits.items()},
        label_names=prepared.dataset.label_names,
        first_step=progress.step,
        total_steps=0 if prepared.recipe.model.train == "features" else job.course.total_steps,
        steps_per_epoch=job.course.steps_per_epoch,
        group_names=tuple(group.name for group in job.assembled.groups),
        data=data_record(prepared),
    )


def data_record(prepared: Prepared) -> DataRecord:
    recipe, model = prepared.recipe, prepared.build.model
    config = None if recipe.model.factory else getattr(model, "config", None)  # a factory's may be anything
    data = recipe.data
    return described(
        prepared.dataset,
        data.max_length,
        max_positions(config),
        overflow=Overflow.of(data),
        vocabulary_size=size_of_vocabulary(recipe, prepared.dataset, prepared.tokenizer),
    )
