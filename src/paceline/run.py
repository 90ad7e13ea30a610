"""A run from recipe to saved model: wiring only, top to bottom."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.compare import differences, refuse_changes
from paceline.checkpoint.store import Checkpoint, CheckpointStore
from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.order import OrderState, ShuffledOrder
from paceline.data.prepare import prepare
from paceline.engine.assemble import Assembled, assemble, assemble_build
from paceline.engine.evaluate import evaluate
from paceline.engine.numerics import numerics
from paceline.errors import CheckpointError, RecipeError
from paceline.facts import Facts
from paceline.files import cache_folder
from paceline.loop import Job, Loop, Progress
from paceline.models.config import max_positions, modality, read_config
from paceline.models.features import collect, fit_final_linear, write_into
from paceline.models.images import image_settings, preferred_size
from paceline.models.load import load_model
from paceline.models.saved import SavedModel, save_model
from paceline.models.structure import blocks, final_linear, set_trained
from paceline.models.tokenizers import tokenizer_source
from paceline.observe.console import console_observer
from paceline.observe.metrics_file import MetricsFile
from paceline.recipe import Recipe
from paceline.records import Decision, EvaluationRecord, Notice, Observer, Record, RunRecord, RunStarted
from paceline.report.build import build_report
from paceline.run_folder import RunFolder
from paceline.seams import Build
from paceline.stop import Stop
from paceline.stopwatch import Stopwatch
from paceline.tasks import task_for


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
    checkpoint: Checkpoint | None = None
    """Where a resumed run goes on."""
    named: frozenset[str] = frozenset()
    """Dotted paths that the user changed on purpose when resuming."""
    previous: Recipe | None = None
    """The recipe that a resumed run was started with."""


@dataclass(frozen=True)
class Prepared:
    """Data and model, ready to be assembled."""

    recipe: Recipe
    decisions: tuple[Decision, ...]
    dataset: Dataset
    tokenizer: Any
    build: Build
    saved: SavedModel


def run(request: Request) -> RunRecord:
    """Carry out a run.

    Raises:
        UserError: anything the user can change; what was written so far stays usable.
        Preempted: a signal asked to stop; the run can be resumed.
    """
    watch, folder = request.watch, request.folder
    notices: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(numerics(request.recipe.techniques.precision, deterministic=request.recipe.deterministic))
        stop = stack.enter_context(Stop())
        prepared = _prepare(request)
        recipe, dataset = prepared.recipe, prepared.dataset
        _write_start(request, recipe, dataset, _check_resumable(request, recipe, dataset))
        emit = _observers(stack, request, recipe, notices)
        for message in dataset.notices:
            emit(Notice(message=message))
        for message in request.checkpoint.notices if request.checkpoint else ():
            emit(Notice(message=message, level="warning"))
        with watch.phase("model"):
            job, progress = _job(request, prepared, emit, stop)
        emit(_started(request, prepared, job, progress))
        loop = Loop(job, progress)
        progress = _fit_features(job, progress, prepared) if recipe.model.train == "features" else loop.run()
        final = _finish(job, progress, prepared, folder)
        record = _summary(request, prepared, job, progress, final, loop.stopped_early, notices)
        folder.write_summary(record)
        if recipe.observe.report:
            build_report(folder.path)
        emit(record)
    return record


def _prepare(request: Request) -> Prepared:
    recipe, watch, part = request.recipe, request.watch, request.recipe.model
    with watch.phase("model"):
        config = read_config(part)
        shapes = _shape_decisions(recipe, max_positions(config), preferred_size(part, config) if part.source else None)
        recipe = recipe.with_settings(f"{decision.setting}={decision.value}" for decision in shapes)
    with watch.phase("data"):
        dataset, tokenizer = encoded(recipe, request.rows, request.folder.quarantine)
    with watch.phase("model"):
        task = task_for(dataset.kind, dataset.label_names, recipe.task)
        shape = dataset.inputs.pixels.shape[1:] if isinstance(dataset.inputs, Images) else None
        images = image_settings(part, shape) if shape else None
        random = recipe.data.random.vocabulary
        model = load_model(
            part,
            config,
            num_labels=task.num_outputs,
            label_names=dataset.label_names,
            kind=dataset.kind,
            vocabulary_size=None if shape else len(tokenizer) if tokenizer else random,
            pad_id=dataset.inputs.pad_id if isinstance(dataset.inputs, Tokens) else None,
            image_shape=shape,
            seed=recipe.seed,
        )
        set_trained(model, part.train)
        build = assemble_build(
            recipe,
            model,
            dataset,
            task,
            torch.device(recipe.device),
            blocks=[block for _, block in blocks(model)],
            normalisation=(images.mean, images.std) if images else ((), ()),
        )
    saved = SavedModel(
        label_names=dataset.label_names,
        kind=dataset.kind,
        modality="image" if images else "text",
        max_length=None if images else recipe.data.max_length,
        image=images,
        factory=part.factory,
    )
    return Prepared(recipe, (*request.decisions, *shapes), dataset, tokenizer, build, saved)


def _shape_decisions(recipe: Recipe, positions: int | None, image_size: int | None) -> list[Decision]:
    """Sizes of samples that the model decides where the recipe leaves them open."""
    data = recipe.data
    if positions is not None and data.max_length > positions:
        if "max_length" in data.model_fields_set:
            raise RecipeError(
                f"data.max_length = {data.max_length}",
                f"the model has positions for {positions} tokens",
                f"--set data.max_length={positions}",
            )
        reason = "the model has no more positions"
        return [Decision(setting="data.max_length", value=str(positions), reason=reason)]
    if image_size is not None and data.image_size is None:
        reason = "the size that the model was trained on"
        return [Decision(setting="data.image_size", value=str(image_size), reason=reason)]
    return []


def encoded(recipe: Recipe, rows: object | None = None, quarantine: Path | None = None) -> tuple[Dataset, Any]:
    """The data set of a recipe whose sizes are settled, and the tokenizer it was encoded with (None without one)."""
    part = recipe.model
    config = read_config(part)
    reads = modality(part, config)
    cache = cache_folder()
    has_tokens = reads == "image" or recipe.data.source == "builtin:random"
    source = None if has_tokens else tokenizer_source(part, config, cache)

    def encode(cache: Path | None) -> Dataset:
        return prepare(
            recipe.data,
            recipe.task,
            tokenizer=source,
            max_length=recipe.data.max_length,
            modality=reads,
            cache=cache,
            rows=rows,
            quarantine=quarantine,
        )

    dataset = encode(cache)
    if source is None or isinstance(dataset.inputs, Images):
        return dataset, None
    tokenizer = source.settle(dataset.fingerprint)
    if tokenizer is None:
        # the encoded data were cached, but the vocabulary trained on them is gone: train it again
        dataset = encode(None)
        tokenizer = source.settle(dataset.fingerprint)
    return dataset, tokenizer


def _check_resumable(request: Request, recipe: Recipe, dataset: Dataset) -> list[str]:
    """Refuse a resume that would learn something else; returns the changes to be recorded."""
    if request.checkpoint is None or request.previous is None:
        return []
    defining, execution = differences(request.previous.resolved(), recipe.resolved())
    saved = request.checkpoint.state["fingerprint"]
    refuse_changes(defining, request.named, old_data=saved, new_data=dataset.fingerprint)
    return [str(change) for change in (*defining, *execution)]


def _write_start(request: Request, recipe: Recipe, dataset: Dataset, changes: Sequence[str]) -> None:
    folder, first_step = request.folder, request.checkpoint.step if request.checkpoint else 0
    folder.write_recipe(recipe)
    folder.write_manifest(
        command=sys.argv,
        hardware=request.facts.plain(),
        data_fingerprint=dataset.fingerprint,
        seeds={"seed": recipe.seed, "data.splits.seed": recipe.data.splits.seed},
        first_step=first_step,
        changes=changes,
    )
    folder.truncate_metrics(first_step)


def _observers(
    stack: contextlib.ExitStack, request: Request, recipe: Recipe, notices: list[str]
) -> Callable[[Record], None]:
    """Open every observer; they are closed with the stack, also when the run fails."""
    watchers: list[Observer] = [
        MetricsFile(request.folder.metrics),
        console_observer(recipe.observe.console, recipe.observe.log_every),
    ]
    if recipe.observe.tensorboard:
        from paceline.observe.tensorboard import TensorBoard

        watchers.append(TensorBoard(request.folder.path / "tensorboard"))
    for watcher in watchers:
        stack.callback(watcher.close)

    def emit(record: Record) -> None:
        if isinstance(record, Notice):
            notices.append(record.message)
        for watcher in watchers:
            watcher.observe(record)

    return emit


def _job(request: Request, prepared: Prepared, emit: Callable[[Record], None], stop: Stop) -> tuple[Job, Progress]:
    """The job and where it begins: at the start, or where the checkpoint left off."""
    recipe, dataset, loop = prepared.recipe, prepared.dataset, prepared.recipe.loop
    order = ShuffledOrder(
        dataset.splits["train"],
        micro_batch_size=loop.micro_batch_size or loop.batch_size,
        shuffle=loop.shuffle,
        drop_last=loop.drop_last,
    )
    steps_per_epoch = order.steps_per_epoch(loop.batch_size)
    if steps_per_epoch == 0:
        raise RecipeError(
            f"loop.batch_size = {loop.batch_size}",
            f"with drop_last, {len(dataset.splits['train'])} training samples make no whole batch",
            f"--set loop.batch_size={len(dataset.splits['train'])} or loop.drop_last=false",
        )
    total_steps = min(loop.max_steps or sys.maxsize, steps_per_epoch * loop.epochs)
    assembled = assemble(recipe, prepared.build, total_steps)
    progress = Progress(order=OrderState(seed=recipe.seed, epoch=0, step=0, batch_size=loop.batch_size))
    if request.checkpoint is not None:
        progress = _restore(request.checkpoint, assembled, progress, total_steps)
    task = prepared.build.task
    job = Job(
        recipe=recipe,
        dataset=dataset,
        assembled=assembled,
        order=order,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        evaluation_batch_size=loop.evaluation_batch_size or loop.batch_size,
        store=CheckpointStore(request.folder.checkpoints, loop.keep_last),
        emit=emit,
        stop=stop,
        watch=request.watch,
        checkpoint_state={"fingerprint": dataset.fingerprint},
        best_metric=task.best_metric if loop.best_metric == "auto" else loop.best_metric,
    )
    return job, progress


def _restore(checkpoint: Checkpoint, assembled: Assembled, fresh: Progress, total_steps: int) -> Progress:
    state = checkpoint.state
    assembled.engine.load({stem: checkpoint.tensors(stem) for stem in ("model", "optimizer")}, state["engine"])
    progress = Progress.parse(state["progress"])
    if progress.step >= total_steps:
        raise CheckpointError(
            f"the run is at step {progress.step}, its end",
            "nothing is left to resume",
            "--set loop.epochs=MORE trains on",
        )
    if progress.order.batch_size != fresh.order.batch_size:
        # another global batch, named on purpose: go on at the same sample as nearly as whole steps allow
        done = progress.order.step * progress.order.batch_size // fresh.order.batch_size
        return replace(progress, order=replace(fresh.order, epoch=progress.order.epoch, step=done))
    return replace(progress, order=replace(progress.order, seed=fresh.order.seed))


def _started(request: Request, prepared: Prepared, job: Job, progress: Progress) -> RunStarted:
    parameters = list(prepared.build.model.parameters())
    card = request.facts.cards[0].name if prepared.recipe.device == "cuda" else None
    return RunStarted(
        name=prepared.recipe.name,
        folder=str(request.folder.path),
        device=card or f"cpu ({torch.get_num_threads()} threads)",
        recipe=prepared.recipe.resolved(),
        decisions=prepared.decisions,
        num_parameters=sum(p.numel() for p in parameters),
        num_trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        samples={name: len(ids) for name, ids in prepared.dataset.splits.items()},
        label_names=prepared.dataset.label_names,
        first_step=progress.step,
        total_steps=job.total_steps,
        steps_per_epoch=job.steps_per_epoch,
        group_names=tuple(group.name for group in job.assembled.groups),
    )


def _fit_features(job: Job, progress: Progress, prepared: Prepared) -> Progress:
    """In place of steps: the final layer's input once for every training sample, and scikit-learn for the layer."""
    recipe, build, dataset = prepared.recipe, prepared.build, prepared.dataset
    linear = final_linear(build.model, build.task.num_outputs)
    ids = build.layout.sorted(dataset.splits["train"])
    size = job.evaluation_batch_size
    with job.watch.phase("train"):
        batches = (build.layout.collate(ids[start : start + size]) for start in range(0, len(ids), size))
        features = collect(build.model, linear, build.forward, batches)
        labels = dataset.labels[ids]
        classifier = recipe.model.classifier
        fitted = fit_final_linear(
            features, labels, dataset.kind, classifier, build.task.num_outputs, bias=linear.bias is not None
        )
        write_into(linear, *fitted)
    return replace(progress, samples=len(ids), train_seconds=job.watch.seconds()["train"])


def _finish(job: Job, progress: Progress, prepared: Prepared, folder: RunFolder) -> dict[str, EvaluationRecord]:
    """Take the best weights, measure them on the held-out splits, save them."""
    engine, build = job.assembled.engine, prepared.build
    with job.watch.phase("checkpoint"):
        step = _take_best(job, progress) if job.recipe.loop.save_best else progress.step
    final = {}
    with job.watch.phase("evaluate"):
        for split in ("validation", "test"):
            if split in prepared.dataset.splits:
                ids = prepared.dataset.splits[split]
                at = {"step": step, "epoch": max(0, (step - 1) // job.steps_per_epoch)}
                final[split] = evaluate(engine.infer, build, split, ids, job.evaluation_batch_size, **at)
    for found in final.values():
        job.emit(found)
    with job.watch.phase("save"):
        save_model(build.model, prepared.tokenizer, folder.model, prepared.saved)
    return final


def _take_best(job: Job, progress: Progress) -> int:
    """Put the best evaluated weights into the engine; returns the step they are from."""
    if progress.best_step in (None, progress.step):
        return progress.step
    best = job.store.best()
    if best is None or best.step != progress.best_step:
        raise CheckpointError(
            f"the best weights, of step {progress.best_step}, are no longer in {job.store.folder}",
            "the run is trained, but what is on the disk is not what was measured as the best",
            "paceline train RUN --resume --set loop.save_best=false saves the last weights instead",
        )
    for message in best.notices:
        job.emit(Notice(message=message, level="warning"))
    job.assembled.engine.load_weights(best.tensors("model"))
    return best.step


def _summary(
    request: Request,
    prepared: Prepared,
    job: Job,
    progress: Progress,
    final: dict[str, EvaluationRecord],
    stopped_early: bool,
    notices: Sequence[str],
) -> RunRecord:
    device = prepared.build.device
    seconds = max(progress.train_seconds, 1e-9)
    return RunRecord(
        name=prepared.recipe.name,
        folder=str(request.folder.path),
        status="stopped early" if stopped_early else "finished",
        steps=progress.step,
        applied_steps=progress.applied,
        epochs=progress.step / job.steps_per_epoch,
        seconds=job.watch.seconds(),
        samples_per_second=progress.samples / seconds,
        tokens_per_second=progress.tokens / seconds,
        padding_share=1 - progress.tokens / progress.slots if progress.slots else 0.0,
        best_step=progress.best_step,
        evaluations=progress.evaluations,
        final={split: {"loss": found.loss, **found.metrics} for split, found in final.items()},
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        decisions=prepared.decisions,
        notices=tuple(notices),
    )
