"""A run from recipe to saved model: wiring only, top to bottom; and what it says where the memory of a GPU is full."""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from paceline.contract.errors import DiskFullError, UserError
from paceline.contract.files import compiled_folder
from paceline.contract.last_resort import GIVE_UP_SECONDS
from paceline.contract.records import EvaluationRecord, MemoryPlan, Notice, Record, RunRecord
from paceline.contract.stop import Stop
from paceline.distributed.agree import agree
from paceline.engine.compile_cache import kept_cache
from paceline.engine.numerics import numerics
from paceline.engine.statistics import fewest_together
from paceline.machine.facts import Facts
from paceline.memory.beside import PlanBeside
from paceline.memory.changes import TracedChange
from paceline.memory.exhausted import Shortage, Situation, explained, traced_offers
from paceline.memory.split import largest_share
from paceline.prepare.preparation import Prepared, prepare_run
from paceline.recipe import Recipe
from paceline.recipe.choose import with_smallest_gpu
from paceline.recipe.techniques import one_process
from paceline.run.baseline import check_baseline
from paceline.run.beginning import begin, changes, measures_otherwise, refuse_finished
from paceline.run.emitter import Emitter
from paceline.run.ending import end, measure
from paceline.run.fitting import fit_features
from paceline.run.job import Job, Request, job_of, mirror_of
from paceline.run.loop import Loop
from paceline.run.progress import Progress
from paceline.run.stopped import given_up, preemption_marked, then, then_with_room
from paceline.seams import Weighed, World


def situation(request: Request, loop: Loop | None = None, beside: PlanBeside | None = None) -> Situation:
    """What is told of the run when its memory is full; without a loop it was still being put together."""
    recipe, data = loop.job.recipe if loop else request.recipe, request.mesh.data
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
        resume=f"with one of them {then(request, saved=True)}" if saved else "start it again: no step was saved",
        largest=largest_share(recipe, num_samples, data.size),
        evaluated=min(recipe.loop.evaluated_together, held_out),
        step=min(step + 1, loop.job.course.total_steps) if loop else 0,
        total_steps=loop.job.course.total_steps if loop else 0,
        held=engine.held() if isinstance(engine, Weighed) else {},
        plan_command=shlex.join(words),
        fewest=fewest_together(loop.job.assembled.build.model) if loop else 1,
        has_states=saved,
        can_split=loop is None or not loop.job.course.strategy.why_not_retried(),
        offers=offers,
    )


def plan_beside(request: Request, prepared: Prepared) -> PlanBeside | None:
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


def run(request: Request) -> RunRecord:
    """Carry out a run. All its ranks call this; the first one writes and shows.

    Raises:
        UserError: anything the user can change; what was written so far stays usable.
        Preempted: a signal asked to stop; the run can be resumed.
    """
    try:
        with preemption_marked(request), contextlib.ExitStack() as stack:
            return _carried_out(request, stack)
    except DiskFullError as error:
        room = error.fix.partition(",")[0] or "free some space there"  # where a run is concerned, its folder stays
        raise DiskFullError(error.what, error.why, f"{room}; {then_with_room(request)}") from error
    except (OSError, UserError) as error:
        if lost := request.folder.find_again():
            raise lost from error
        raise


def _carried_out(request: Request, stack: contextlib.ExitStack) -> RunRecord:
    """From the recipe to the saved model; what is opened for it is closed with ``stack``."""
    emitter = Emitter()
    mirror_of(request)  # before anything is read: what cannot be written is told at once
    stop = _surroundings(request, stack)
    # nothing in the folder changes before all that can refuse has agreed
    prepared = _prepared(request, stack)
    learned, otherwise = changes(request, prepared)
    job, progress = _job(request, prepared, emitter.emit, stop, stack)
    loop = Loop(job, progress, saved_step=None if learned or not request.checkpoint else progress.step)
    refuse_finished(request, loop)
    beside = plan_beside(request, prepared)
    stack.enter_context(explained(partial(situation, request, loop, beside)))
    with stop.noted():
        begin(request, prepared, loop, [*learned, *otherwise], emitter, beside, stack)
        stop.then = then(request, saved=_has_steps(prepared))
        if learned:
            loop.save()  # what was agreed to now is agreed to for the next resume
            job.store.wait()
        if _has_steps(prepared):
            _train(request, loop)
    progress, final = _measured(prepared, loop, stop)
    # a model that is nearly saved is saved; where that takes long, a resume saves it from the last checkpoint
    with stop.noted(lambda: GIVE_UP_SECONDS if loop.saved_step == progress.step else math.inf):
        return end(request, prepared, loop, progress, final, emitter, beside)


def _surroundings(request: Request, stack: contextlib.ExitStack) -> Stop:
    """What holds in this process for as long as the run: numerics, caches, what errors say and what signals do."""
    recipe = request.recipe
    if not request.world.is_first:
        # the first rank says the same
        stack.enter_context(warnings.catch_warnings(action="ignore"))
    numeric = numerics(recipe.techniques.precision, deterministic=recipe.deterministic, device=recipe.device)
    stack.enter_context(numeric)
    if recipe.device == "cuda" and recipe.techniques.compile is not False:
        stack.enter_context(kept_cache(compiled_folder()))
    stack.enter_context(explained(partial(situation, request)))
    stop = Stop(then(request, saved=request.checkpoint is not None))
    stop.given_up = partial(given_up, request, stop)
    return stack.enter_context(stop)


def _prepared(request: Request, stack: contextlib.ExitStack) -> Prepared:
    """Data and model, which all ranks have alike."""
    asked, world = request.recipe, request.world
    prepared = prepare_run(
        asked,
        request.decisions,
        facts=shared_facts(asked, request.facts, world),
        watch=request.watch,
        rows=request.rows,
        quarantine=request.folder.quarantine if world.is_first else None,
        mesh=request.mesh,
    )
    with request.watch.phase("data"):
        # by the layout ranks share out the batches of an evaluation among themselves
        layout = prepared.build.layout_kind.value
        agree(world, "the data", {"fingerprint": prepared.dataset.fingerprint, "layout": layout})
    stack.callback(prepared.build.close)
    if prepared.recipe.observe.baseline:
        check_baseline(prepared.dataset, has_texts=prepared.tokenizer is not None)
    return prepared


def _job(
    request: Request, prepared: Prepared, emit: Callable[[Record], None], stop: Stop, stack: contextlib.ExitStack
) -> tuple[Job, Progress]:
    """What the loop drives, and the place where it begins or goes on."""
    with request.watch.phase("model"):
        job, progress = job_of(request, prepared, emit, stop)
        if measures_otherwise(request, prepared):
            progress = progress.judged_anew()
    stack.callback(job.assembled.engine.close)
    stack.callback(job.store.close)
    if job.mirror is not None:
        stack.callback(job.mirror.close)
    if job.recorder is not None:
        stack.callback(job.recorder.close)
    return job, progress


def _has_steps(prepared: Prepared) -> bool:
    return prepared.recipe.model.train != "features"


def _train(request: Request, loop: Loop) -> None:
    # signals are only noted here: when another rank has ended, torchrun sends one to those that have not
    with preemption_marked(request):
        progress = loop.run()
    job = loop.job
    fall = "" if job.recipe.loop.save_best else progress.fall(job.best_metric)
    if fall:
        saved = "the last weights are saved; loop.save_best=true keeps the best"
        job.emit(Notice(message=f"{fall}: {saved}", level="warning"))


def _measured(prepared: Prepared, loop: Loop, stop: Stop) -> tuple[Progress, Mapping[str, EvaluationRecord]]:
    """Where the run ended, and what the weights that are kept come to."""
    progress = loop.progress
    if not _has_steps(prepared):
        stop.check()
        progress = fit_features(loop.job, progress, prepared)
        return progress, measure(loop, progress)
    # steps whose end is on the disk can be measured another time; if it is not, they are seen through
    is_saved = loop.saved_step == progress.step
    if is_saved:
        stop.check()
    with contextlib.nullcontext() if is_saved else stop.noted():
        return progress, measure(loop, progress)


def shared_facts(recipe: Recipe, facts: Facts, world: World) -> Facts:
    """This machine's facts, but for the memory of its GPUs: the run's smallest, by which all ranks choose alike."""
    if world.size == 1 or recipe.device != "cuda":
        return facts
    sizes = world.gather([gpu.memory_bytes for gpu in facts.gpus])
    return with_smallest_gpu(facts, itertools.chain(*sizes))
