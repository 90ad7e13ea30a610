"""What a run knows, and can be told, where the memory of a GPU is full."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from paceline.contract.records import MemoryPlan
from paceline.engine.statistics import fewest_together
from paceline.memory.beside import PlanBeside
from paceline.memory.changes import TracedChange
from paceline.memory.exhausted import Shortage, Situation, traced_offers
from paceline.memory.split import largest_share
from paceline.prepare.preparation import Prepared
from paceline.recipe import Recipe
from paceline.recipe.techniques import one_process
from paceline.run.job import Request
from paceline.run.loop import Loop
from paceline.run.stopped import then
from paceline.seams import Weighed


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
