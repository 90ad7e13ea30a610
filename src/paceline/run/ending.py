"""After the last step: the weights that are kept are measured, judged and saved, and all of it is summed up."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from paceline.contract.errors import RunFolderError, UserError
from paceline.contract.records import Decision, EvaluationRecord, MemoryRecord, Notice, RunRecord
from paceline.memory.beside import PlanBeside, measured
from paceline.models.adapters import merged
from paceline.models.saved import save_model
from paceline.prepare.preparation import Prepared
from paceline.report.build import build_report
from paceline.run.baseline import NAME as BASELINE
from paceline.run.baseline import measure_baseline
from paceline.run.beginning import data_record
from paceline.run.checkpoint.mirror import END_SECONDS
from paceline.run.emitter import Emitter
from paceline.run.job import Job, Request
from paceline.run.learned import no_better_than, nothing_learned
from paceline.run.loop import Loop
from paceline.run.progress import Progress
from paceline.run.scores import saved
from paceline.run_folder import way_on
from paceline.seams import Task, Tensors
from paceline.tasks.threshold import by_label
from paceline.techniques.compile import fused


def measure(loop: Loop, progress: Progress) -> dict[str, EvaluationRecord]:
    """Take the best weights and measure them on the held-out splits; what is known of them is not measured again.

    Where an average of the weights is kept, and is what is to be saved, it takes their place in the end. Thresholds
    that are to be tuned are found before, on validation alone, with the weights that are to be saved.
    """
    job, engine = loop.job, loop.job.assembled.engine
    with job.watch.phase("checkpoint"):
        step = progress.step
        if job.recipe.loop.save_best and progress.best_step not in (None, step):
            step = _take_best(job, progress)
        engine.settle()
    epoch = max(0, (step - 1) // job.course.steps_per_epoch)
    known = {found.split: found for found in progress.evaluations if found.step == step}
    final: dict[str, EvaluationRecord] = {}
    save: str = job.recipe.saves
    with job.watch.phase("evaluate"):
        if job.recipe.task.threshold == "tuned":
            if save == "best":
                found = loop.evaluated(engine.infer, "validation", step=step, epoch=epoch)
                save = saved({"validation": found}, save)
            with (engine.averaged() if save == "ema" else None) or contextlib.nullcontext():
                loop.tune(engine.infer, step=step, epoch=epoch)
            known = {}  # by other thresholds
        for split in ("validation", "test"):
            if split in known:
                final[split] = known[split]
            elif split in job.dataset.splits:
                final[split] = loop.evaluated(engine.infer, split, step=step, epoch=epoch, save=save)
            save = saved(final, save)  # the validation split says which are better
    if save == "ema":
        engine.take_average()
    return final


def _take_best(job: Job, progress: Progress) -> int:
    """Put the best evaluated weights, and their average, into the engine of every rank; returns their step."""
    # the first rank alone need see the checkpoints: the others may be on machines without this disk
    best = _best_weights(job, progress) if job.world.is_first else {}
    kinds = job.world.share(
        {stem: {name: [list(t.shape), str(t.dtype)] for name, t in named.items()} for stem, named in best.items()}
    )
    if not kinds:
        return progress.step
    if not job.world.is_first:
        best = {
            stem: {name: torch.empty(shape, dtype=getattr(torch, dtype[6:])) for name, (shape, dtype) in named.items()}
            for stem, named in kinds.items()
        }
    job.world.broadcast_([tensor for named in best.values() for tensor in named.values()])
    job.assembled.engine.load(best)
    return progress.best_step or progress.step


def _best_weights(job: Job, progress: Progress) -> Tensors:
    """The best evaluated weights and their average, in main memory; none where their checkpoint is gone."""
    best = job.store.best()
    if best is None or best.step != progress.best_step:
        lost = f"the best weights, of step {progress.best_step}, are no longer among the checkpoints"
        job.emit(Notice(message=f"{lost}; the last ones are measured and saved instead", level="warning"))
        return {}
    for message in best.notices:
        job.emit(Notice(message=message, level="warning"))
    stems = ("model",) if job.recipe.optimizer.ema is None else ("model", "ema")
    return {stem: best.tensors(stem) for stem in stems}


def end(
    request: Request,
    prepared: Prepared,
    loop: Loop,
    progress: Progress,
    final: Mapping[str, EvaluationRecord],
    emitter: Emitter,
    beside: PlanBeside | None,
) -> RunRecord:
    """Save the model, tell what became of the run, and sum it up.

    Args:
        final: what the weights that are saved come to, by split.
        beside: has predicted the run's memory.
    """
    job, folder, watch, world = loop.job, request.folder, request.watch, request.world
    with watch.phase("save"):
        weights = job.assembled.engine.whole()
        if world.is_first:
            _save(request, prepared, job.assembled.build.task, weights)
    for found in final.values():
        if found not in progress.evaluations:
            job.emit(found)
    baseline, told = _judged(request, prepared, job, final)
    for message in filter(None, [emitter.losses.rise(progress.evaluations), *told]):
        job.emit(Notice(message=message, level="warning"))
    # the plan is of the micro-batches that the run began with
    memory = measured(prepared.build.device, world, None if loop.decisions else beside)
    if job.recorder is not None:
        with watch.phase("save"):
            world.barrier("the traces")  # which the report reads
    with watch.phase("checkpoint"):
        loop.see_mirrored(END_SECONDS)
    record = _summary(request, prepared, loop, progress, final, emitter.notices, memory, baseline)
    if world.is_first:
        folder.write_summary(record)
        if prepared.recipe.observe.report:
            with watch.phase("save"):
                build_report(folder.path)
    job.emit(record)
    with watch.phase("save"):
        world.barrier("the saved model")
    _tell_traces(job)
    return record


def _judged(
    request: Request, prepared: Prepared, job: Job, final: Mapping[str, EvaluationRecord]
) -> tuple[Mapping[str, Mapping[str, float]], list[str]]:
    """The baseline's scores, where one is asked for, and what is to be said of a model that is no better than less."""
    told = [nothing_learned(final, prepared.dataset)]
    if not prepared.recipe.observe.baseline:
        return {}, told
    scores: Mapping[str, Mapping[str, float]] = {}
    # the model is saved by now, and what goes wrong here is no reason to lose the run's summary
    with job.watch.phase("evaluate"), job.world.alone_first("fitting the baseline"):
        if job.world.is_first:
            part, task = prepared.recipe.data, prepared.build.task
            try:
                scores = measure_baseline(part, prepared.dataset, task, tuple(final), request.rows)
            except (UserError, ValueError) as error:
                told.append(f"observe.baseline = {prepared.recipe.observe.baseline}: not fitted: {error}")
    scores, told = job.world.share((scores, told))
    return scores, [*told, no_better_than(BASELINE, scores, final, job.best_metric)]


def _save(request: Request, prepared: Prepared, task: Task, weights: Mapping[str, torch.Tensor]) -> None:
    """Save the trained model, in another folder where the run's own is gone.

    Raises:
        RunFolderError: it is.
    """
    folder = request.folder
    lost = folder.find_again()
    if not folder.recipe.exists():  # without it nobody can use the model
        folder.write_recipe(prepared.recipe)
    model, part = prepared.build.model, prepared.recipe.model
    if part.train == "lora" and part.lora.merge:
        weights = merged(model, weights)
    told = replace(prepared.saved, thresholds=task.thresholds)
    save_model(model, prepared.tokenizer, folder.model, told, weights)
    if lost is not None:
        raise RunFolderError(lost.what, f"{lost.why}; the trained model is saved in it", way_on(folder.path))
    if lost := folder.find_again():
        raise lost


def _summary(
    request: Request,
    prepared: Prepared,
    loop: Loop,
    progress: Progress,
    final: Mapping[str, EvaluationRecord],
    notices: Sequence[str],
    memory: MemoryRecord | None,
    baseline: Mapping[str, Mapping[str, float]],
) -> RunRecord:
    job = loop.job
    seconds = job.watch.seconds()
    train_seconds = max(seconds.get("train", 0.0), 1e-9)
    return RunRecord(
        name=prepared.recipe.name,
        folder=str(request.folder.path),
        status="stopped early" if loop.stopped_early else "finished",
        steps=progress.step,
        applied_steps=progress.applied,
        epochs=progress.step / job.course.steps_per_epoch,
        seconds=seconds,
        samples_per_second=progress.samples / train_seconds,
        tokens_per_second=progress.tokens / train_seconds,
        padding_share=1 - progress.tokens / progress.slots if progress.slots else 0.0,
        best_step=progress.best_step,
        evaluations=progress.evaluations,
        final={split: {"loss": found.loss, **found.metrics} for split, found in final.items()},
        peak_bytes=memory.allocated if memory else None,
        decisions=_with_what_gave_way(prepared.decisions, loop.decisions),
        notices=tuple(notices),
        overlapped_seconds=job.watch.overlapped(),
        execution={**prepared.build.execution, **fused(prepared.build.model), **job.assembled.engine.execution},
        first_update_seconds=job.watch.marked("first_update"),
        memory=memory,
        data=data_record(prepared),
        baseline=baseline,
        saved_step=next((found.step for found in final.values()), progress.step),
        saved=saved(final, job.recipe.saves),
        final_scores={split: found.scores for split, found in final.items() if found.scores},
        loss_scaling=progress.scaling,
        thresholds=by_label(job.assembled.build.task),
    )


def _with_what_gave_way(first: Sequence[Decision], later: Sequence[Decision]) -> tuple[Decision, ...]:
    settings = {decision.setting for decision in later}
    return (*(decision for decision in first if decision.setting not in settings), *later)


def _tell_traces(job: Job) -> None:
    """What the windows of this start show; the run is whole and on the disk by now."""
    recorder = job.recorder
    if recorder is None or not job.world.is_first:
        return
    from paceline.tracing.outcome import trace_record

    for folder in recorder.written:
        job.emit(trace_record(folder))
