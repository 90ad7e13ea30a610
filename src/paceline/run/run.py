"""A run from recipe to saved model: wiring only, top to bottom."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.contract.errors import CheckpointError, DiskFullError, Preempted, RunFolderError, UserError
from paceline.contract.files import compiled_folder
from paceline.contract.records import (
    DataRecord,
    Decision,
    EvaluationRecord,
    MemoryPlan,
    MemoryRecord,
    Notice,
    Observer,
    Record,
    RunRecord,
    RunStarted,
    StepRecord,
)
from paceline.contract.redaction import without_credentials
from paceline.contract.stop import Stop
from paceline.data.describe import described
from paceline.distributed.agree import agree
from paceline.engine.numerics import numerics
from paceline.engine.statistics import fewest_together
from paceline.machine.facts import Facts
from paceline.memory.beside import PlanBeside, measured
from paceline.memory.changes import TracedChange
from paceline.memory.exhausted import Shortage, Situation, explained, traced_offers
from paceline.memory.split import largest_share
from paceline.models.config import max_positions
from paceline.models.saved import save_model
from paceline.models.structure import parameter_counts
from paceline.observe.console import console_observer
from paceline.observe.metrics_file import MetricsFile
from paceline.prepare.preparation import Prepared, prepare_run
from paceline.recipe import Recipe
from paceline.recipe.choose import with_smallest_gpu
from paceline.recipe.places import absolute
from paceline.recipe.techniques import one_process
from paceline.recipe.trust import switches
from paceline.report.build import build_report
from paceline.run.baseline import NAME as BASELINE
from paceline.run.baseline import check_baseline, measure_baseline
from paceline.run.checkpoint.compare import differences, refuse_changes
from paceline.run.fitting import fit_features
from paceline.run.job import Job, Request, job_of
from paceline.run.learned import LossCourse, no_better_than, nothing_learned
from paceline.run.loop import Loop
from paceline.run.progress import Progress
from paceline.run_folder import RunFolder, has_checkpoint, way_on, way_to_more
from paceline.seams import Weighed, World
from paceline.techniques.compile import fused, kept_cache
from paceline.techniques.precision import WEIGHTS, rounded_away


def run(request: Request) -> RunRecord:
    """Carry out a run. All its ranks call this; the first one writes and shows.

    Raises:
        UserError: anything the user can change; what was written so far stays usable.
        Preempted: a signal asked to stop; the run can be resumed.
    """
    try:
        with _preemption_marked(request):
            return _carried_out(request)
    except DiskFullError as error:
        room = error.fix.partition(",")[0] or "free some space there"  # where a run is concerned, its folder stays
        raise DiskFullError(error.what, error.why, f"{room}; {_then_with_room(request)}") from error
    except (OSError, UserError) as error:
        if lost := request.folder.find_again():
            raise lost from error
        raise


def _carried_out(request: Request) -> RunRecord:
    asked, watch, folder, world = request.recipe, request.watch, request.folder, request.world
    notices: list[str] = []
    watchers: list[Observer] = []
    course = LossCourse()

    def emit(record: Record) -> None:
        if isinstance(record, Notice):
            record = replace(record, message=without_credentials(record.message))
            notices.append(record.message)
        if isinstance(record, StepRecord):
            course.add(record)
        for watcher in watchers:
            watcher.observe(record)

    with contextlib.ExitStack() as stack:
        if not world.is_first:
            # the first rank says the same
            stack.enter_context(warnings.catch_warnings(action="ignore"))
        numeric = numerics(asked.techniques.precision, deterministic=asked.deterministic, device=asked.device)
        stack.enter_context(numeric)
        if asked.device == "cuda" and asked.techniques.compile is not False:
            stack.enter_context(kept_cache(compiled_folder()))
        stack.enter_context(explained(partial(_situation, request)))
        stop = stack.enter_context(Stop(_then(request, saved=request.checkpoint is not None)))
        # nothing in the folder changes before all that can refuse has agreed
        prepared = prepare_run(
            asked,
            request.decisions,
            facts=shared_facts(asked, request.facts, world),
            watch=watch,
            rows=request.rows,
            quarantine=folder.quarantine if world.is_first else None,
            world=world,
        )
        with watch.phase("data"):
            # by the layout ranks share out the batches of an evaluation among themselves
            layout = prepared.build.layout_kind.value
            agree(world, "the data", {"fingerprint": prepared.dataset.fingerprint, "layout": layout})
        stack.callback(prepared.build.layout.close)
        if prepared.recipe.observe.baseline:
            check_baseline(prepared.dataset, has_texts=prepared.tokenizer is not None)
        learned, carried_out = _changes(request, prepared)
        with watch.phase("model"):
            job, progress = job_of(request, prepared, emit, stop)
            if _measures_otherwise(request, prepared):
                progress = progress.judged_anew()
        stack.callback(job.assembled.engine.close)
        stack.callback(job.store.close)
        if job.recorder is not None:
            stack.callback(job.recorder.close)
        loop = Loop(job, progress, saved_step=None if learned or not request.checkpoint else progress.step)
        _refuse_finished(request, loop)
        has_steps = prepared.recipe.model.train != "features"
        beside = _plan_beside(request, prepared)
        stack.enter_context(explained(partial(_situation, request, loop, beside)))
        with stop.noted():
            with watch.phase("start"):
                if world.is_first:
                    _write_start(request, prepared, [*learned, *carried_out])
                    watchers += _observers(stack, folder, prepared.recipe, beside)
                emit(_started(request, prepared, job, progress))
                for notice in _first_notices(request, prepared):
                    emit(notice)
                if job.recorder is not None:
                    job.recorder.announce()
            stop.then = _then(request, saved=has_steps)
            if learned:
                loop.save()  # what was agreed to now is agreed to for the next resume
                job.store.wait()
            if has_steps:
                # signals are only noted here: when another rank has ended, torchrun sends one to those that have not
                with _preemption_marked(request):
                    progress = loop.run()
                fall = "" if prepared.recipe.loop.save_best else progress.fall(job.best_metric)
                if fall:
                    saved = "the last weights are saved; loop.save_best=true keeps the best"
                    emit(Notice(message=f"{fall}: {saved}", level="warning"))
        if not has_steps or loop.saved_step == progress.step:
            stop.check()
        # steps whose end is on the disk can be measured another time; if it is not, they are seen through
        with stop.noted() if has_steps and loop.saved_step != progress.step else contextlib.nullcontext():
            if not has_steps:
                progress = fit_features(job, progress, prepared)
            final = _measure(loop, progress)
        with stop.noted():
            with watch.phase("save"):
                weights = job.assembled.engine.whole()
                if world.is_first:
                    _save_model(request, prepared, weights)
            for found in final.values():
                if found not in progress.evaluations:
                    emit(found)
            baseline, told = _judged(request, prepared, job, final)
            for message in filter(None, [course.rise(progress.evaluations), *told]):
                emit(Notice(message=message, level="warning"))
            # the plan is of the micro-batches that the run began with
            memory = measured(prepared.build.device, world, None if loop.decisions else beside)
            if job.recorder is not None:
                with watch.phase("save"):
                    world.barrier("the traces")  # which the report reads
            record = _summary(request, prepared, loop, progress, final, notices, memory, baseline)
            if world.is_first:
                folder.write_summary(record)
                if prepared.recipe.observe.report:
                    with watch.phase("save"):
                        build_report(folder.path)
            emit(record)
            with watch.phase("save"):
                world.barrier("the saved model")
            _tell_traces(loop, emit)
    return record


def _save_model(request: Request, prepared: Prepared, weights: Mapping[str, torch.Tensor]) -> None:
    """Save the trained model, in another folder where the run's own is gone.

    Raises:
        RunFolderError: it is.
    """
    folder = request.folder
    lost = folder.find_again()
    if not folder.recipe.exists():  # without it nobody can use the model
        folder.write_recipe(prepared.recipe)
    save_model(prepared.build.model, prepared.tokenizer, folder.model, prepared.saved, weights)
    if lost is not None:
        raise RunFolderError(lost.what, f"{lost.why}; the trained model is saved in it", way_on(folder.path))
    if lost := folder.find_again():
        raise lost


def _tell_traces(loop: Loop, emit: Callable[[Record], None]) -> None:
    """What the windows of this start show; the run is whole and on the disk by now."""
    recorder = loop.job.recorder
    if recorder is None or not loop.job.world.is_first:
        return
    from paceline.tracing.outcome import trace_record

    for folder in recorder.written:
        emit(trace_record(folder))


def shared_facts(recipe: Recipe, facts: Facts, world: World) -> Facts:
    """This machine's facts, but for the memory of its GPUs: the run's smallest, by which all ranks choose alike."""
    if world.size == 1 or recipe.device != "cuda":
        return facts
    sizes = world.gather([gpu.memory_bytes for gpu in facts.gpus])
    return with_smallest_gpu(facts, itertools.chain(*sizes))


@contextlib.contextmanager
def _preemption_marked(request: Request) -> Iterator[None]:
    """A stop leaves word in the run folder."""
    try:
        yield
    except Preempted as stopped:
        if request.world.is_first:
            request.folder.mark_preempted(str(stopped))
        raise


def _then(request: Request, *, saved: bool) -> str:
    """What a person does after a stop."""
    if not saved:
        return "no step was made, so nothing is lost: start it again"
    if request.rows is not None:
        return f"paceline.resume({str(request.folder.path)!r}, data=rows) goes on"
    return f"paceline train {shlex.quote(str(request.folder.path))} --resume{switches(request.recipe)} goes on"


def _then_with_room(request: Request) -> str:
    """What a person does once the disk has room again."""
    folder = request.folder
    if folder.summary.exists():
        return f"the run itself is whole: paceline report {shlex.quote(str(folder.path))}"
    if has_checkpoint(folder.path):
        return _then(request, saved=True)
    return way_on(folder.path) if folder.recipe.exists() else "start it again"


def _changes(request: Request, prepared: Prepared) -> tuple[list[str], list[str]]:
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


def _measures_otherwise(request: Request, prepared: Prepared) -> str:
    """What a resumed run measures with that it did not before the checkpoint; empty where all is as it was."""
    if request.checkpoint is None:
        return ""
    saved, recipe = Recipe.parse(request.checkpoint.state["recipe"]), prepared.recipe
    changed = {
        "the data": request.checkpoint.state["fingerprint"] != prepared.dataset.fingerprint,
        "the task": saved.task.model_dump() != recipe.task.model_dump(),
        "loop.best_metric": saved.loop.best_metric != recipe.loop.best_metric,
    }
    return " and ".join(name for name, is_other in changed.items() if is_other)


def _refuse_finished(request: Request, loop: Loop) -> None:
    """A run that has its summary has nothing to go on with, unless a setting made it longer."""
    if loop.ended and request.folder.summary.exists():
        early = loop.stopped_early
        raise CheckpointError(
            f"{request.folder.path}: the run {'was stopped early at' if early else 'is at'} step {loop.progress.step}"
            + ("" if early else ", its end"),
            "nothing is left to resume",
            way_to_more(loop.job.recipe, stopped_early=early),
        )


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


def _plan_beside(request: Request, prepared: Prepared) -> PlanBeside | None:
    """What predicts the run's memory while it runs; None without a GPU, or where it is not wanted."""
    recipe = prepared.recipe
    if recipe.device != "cuda" or not recipe.observe.memory_plan or not request.world.is_first:
        return None
    obstacle = "the rows are in memory, and a plan reads them from a file" if request.rows is not None else ""
    command, num_gpus = shlex.join(_planning(request, recipe)), _num_gpus(request, recipe)
    return PlanBeside(recipe, request.facts.gpus[0], world_size=num_gpus, obstacle=obstacle, command=command)


def _planning(request: Request, recipe: Recipe) -> list[str]:
    """The words of the command that plans the run, on a GPU."""
    words = ["paceline", "plan", str(request.folder.recipe), "--gpu", request.facts.gpus[0].name]
    return words if _num_gpus(request, recipe) == 1 else [*words, "--gpus", str(_num_gpus(request, recipe))]


def _num_gpus(request: Request, recipe: Recipe) -> int:
    """That the run has: one a rank, or, with ``dp``, all that its one process sees."""
    return len(request.facts.gpus) if one_process(recipe.parallel.strategy) else request.world.size


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


def _first_notices(request: Request, prepared: Prepared) -> list[Notice]:
    found = [Notice(message=message) for message in prepared.dataset.notices]
    found += [Notice(message=message, level="warning") for message in prepared.build.notices]
    num_samples, batch_size = len(prepared.dataset.splits["train"]), prepared.recipe.loop.batch_size
    if num_samples < batch_size:
        few = f"{num_samples:,} training samples are fewer than loop.batch_size = {batch_size:,}: an epoch is one step"
        found.append(Notice(message=few))
    if prepared.recipe.techniques.precision in WEIGHTS and prepared.recipe.model.train != "features":
        found.append(Notice(message=rounded_away(prepared.recipe.optimizer), level="warning"))
    if request.checkpoint:
        found += [Notice(message=message, level="warning") for message in request.checkpoint.notices]
    if otherwise := _measures_otherwise(request, prepared):
        anew = f"{otherwise} changed: the best step is looked for anew, and what was measured before does not count"
        found.append(Notice(message=anew, level="warning"))
    return found


def _situation(request: Request, loop: Loop | None = None, beside: PlanBeside | None = None) -> Situation:
    """What is told of the run when its memory is full; without a loop it was still being put together."""
    recipe, world = loop.job.recipe if loop else request.recipe, request.world
    step = loop.progress.step if loop else 0
    splits = loop.job.dataset.splits if loop else {}
    num_samples = len(splits["train"]) if loop else recipe.loop.batch_size
    held_out = max((len(splits[name]) for name in ("validation", "test") if name in splits), default=sys.maxsize)
    saved = request.checkpoint is not None or (loop is not None and loop.saved_step is not None)
    words = _planning(request, recipe) if recipe.device == "cuda" else []
    engine = loop.job.assembled.engine if loop else None

    def offers(shortage: Shortage) -> Sequence[TracedChange]:
        if beside is None or request.rows is not None:
            return ()
        known = beside.result() if loop and not loop.decisions else ""
        plan = known if isinstance(known, MemoryPlan) else None
        return traced_offers(recipe, request.facts, shortage, num_gpus=_num_gpus(request, recipe), known=plan)

    return Situation(
        recipe=recipe,
        resume=f"with one of them {_then(request, saved=True)}" if saved else "start it again: no step was saved",
        largest=largest_share(recipe, num_samples, world.size),
        evaluated=min(recipe.loop.evaluation_batch_size or recipe.loop.batch_size, held_out),
        step=min(step + 1, loop.job.course.total_steps) if loop else 0,
        total_steps=loop.job.course.total_steps if loop else 0,
        held=engine.held() if isinstance(engine, Weighed) else {},
        plan_command=shlex.join(words),
        fewest=fewest_together(loop.job.assembled.build.model) if loop else 1,
        has_states=saved,
        offers=offers,
    )


def _started(request: Request, prepared: Prepared, job: Job, progress: Progress) -> RunStarted:
    whole, trained = parameter_counts(prepared.build.model)
    is_gpu = prepared.recipe.device == "cuda"
    device = request.facts.gpus[0].name if is_gpu else f"cpu ({torch.get_num_threads()} threads)"
    return RunStarted(
        name=prepared.recipe.name,
        folder=str(request.folder.path),
        device=device if request.world.size == 1 else f"{request.world.size} x {device}",
        recipe=prepared.recipe.resolved(),
        decisions=prepared.decisions,
        num_parameters=whole,
        num_trained_parameters=trained,
        samples={name: len(ids) for name, ids in prepared.dataset.splits.items()},
        label_names=prepared.dataset.label_names,
        first_step=progress.step,
        total_steps=0 if prepared.recipe.model.train == "features" else job.course.total_steps,
        steps_per_epoch=job.course.steps_per_epoch,
        group_names=tuple(group.name for group in job.assembled.groups),
        data=_described(prepared),
    )


def _described(prepared: Prepared) -> DataRecord:
    recipe, model = prepared.recipe, prepared.build.model
    config = None if recipe.model.factory else getattr(model, "config", None)  # a factory's may be anything
    return described(prepared.dataset, recipe.data.max_length, max_positions(config))


def _measure(loop: Loop, progress: Progress) -> dict[str, EvaluationRecord]:
    """Take the best weights and measure them on the held-out splits; what is known of them is not measured again."""
    job, engine = loop.job, loop.job.assembled.engine
    with job.watch.phase("checkpoint"):
        step = progress.step
        if job.recipe.loop.save_best and progress.best_step not in (None, step):
            step = _take_best(job, progress)
        engine.settle()
    known = {found.split: found for found in progress.evaluations if found.step == step}
    final: dict[str, EvaluationRecord] = {}
    with job.watch.phase("evaluate"):
        for split in ("validation", "test"):
            if split in known:
                final[split] = known[split]
            elif split in job.dataset.splits:
                epoch = max(0, (step - 1) // job.course.steps_per_epoch)
                final[split] = loop.evaluated(engine.infer, split, step=step, epoch=epoch)
    return final


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


def _take_best(job: Job, progress: Progress) -> int:
    """Put the best evaluated weights into the engine of every rank; returns the step they are from."""
    # the first rank alone need see the checkpoints: the others may be on machines without this disk
    best = _best_weights(job, progress) if job.world.is_first else {}
    kinds = job.world.share({name: [list(found.shape), str(found.dtype)] for name, found in best.items()})
    if not kinds:
        return progress.step
    if not job.world.is_first:
        best = {name: torch.empty(shape, dtype=getattr(torch, dtype[6:])) for name, (shape, dtype) in kinds.items()}
    job.world.broadcast_(list(best.values()))
    job.assembled.engine.load({"model": dict(best)})
    return progress.best_step or progress.step


def _best_weights(job: Job, progress: Progress) -> Mapping[str, torch.Tensor]:
    """The best evaluated weights, in main memory; none where their checkpoint is gone."""
    best = job.store.best()
    if best is None or best.step != progress.best_step:
        lost = f"the best weights, of step {progress.best_step}, are no longer among the checkpoints"
        job.emit(Notice(message=f"{lost}; the last ones are measured and saved instead", level="warning"))
        return {}
    for message in best.notices:
        job.emit(Notice(message=message, level="warning"))
    return best.tensors("model")


def _summary(
    request: Request,
    prepared: Prepared,
    loop: Loop,
    progress: Progress,
    final: dict[str, EvaluationRecord],
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
        data=_described(prepared),
        baseline=baseline,
    )


def _with_what_gave_way(first: Sequence[Decision], later: Sequence[Decision]) -> tuple[Decision, ...]:
    settings = {decision.setting for decision in later}
    return (*(decision for decision in first if decision.setting not in settings), *later)
