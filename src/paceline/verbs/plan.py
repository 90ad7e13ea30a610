"""``paceline plan``: a run's memory, what fits and what ``train`` would choose, before the run and without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, final

from paceline.contract.errors import RecipeError, UserError
from paceline.contract.plain import plain
from paceline.contract.python_fixes import python_fixes
from paceline.contract.records import Decision, MemoryPlan
from paceline.machine.facts import Facts, Gpu, this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.changes import (
    Change,
    PlanWith,
    TracedChange,
    cheapest_changes,
    samples_of_a_process,
    single_changes,
)
from paceline.memory.formula import Textbook, textbook
from paceline.memory.predict import Predictor
from paceline.memory.search import LargestMicroBatch, largest_micro_batch, usable_bytes
from paceline.recipe import Recipe
from paceline.recipe.choose import choose, num_processes
from paceline.recipe.techniques import one_process, shards

Trace = Callable[[Recipe, int], MemoryPlan]
"""What one rank of a chosen recipe takes on so many GPUs, see ``Predictor.plan``."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run before the run."""

    recipe: Recipe
    """As ``train`` would choose it on a machine with these GPUs."""
    gpus: int
    memory: MemoryPlan
    """What one rank takes."""
    decisions: tuple[Decision, ...]
    """All that is chosen, with reasons."""
    usable_bytes: int | None
    """What the plan may come to on the GPU, see ``usable_bytes``; None where its memory is not known."""
    largest: LargestMicroBatch | None
    """None where the GPU's memory is not known, or no step is made (``model.train: features``)."""
    largest_settings: tuple[str, ...]
    """What to set for it; empty where the recipe has it already, or there is none."""
    changes: tuple[TracedChange, ...]
    """What would make it fit; empty where it does."""
    formula: Textbook
    """Beside the plan, never instead of it."""

    @property
    def spare_bytes(self) -> int | None:
        """What is left of the GPU's memory; below 0 where the run does not fit; None where that is not known."""
        return None if self.usable_bytes is None else self.usable_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether the GPU can hold the run; None where its memory is not known."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    def plain(self) -> dict[str, Any]:
        """Nested plain data, sizes in bytes: what ``--json`` prints."""
        memory, largest = plain(self.memory), self.largest
        del memory["decisions"], memory["notices"]  # they stand beside it
        return {
            "name": self.recipe.name,
            "model": model_name(self.recipe),
            "gpus": self.gpus,
            "strategy": self.recipe.parallel.strategy if self.gpus > 1 else None,
            "precision": self.recipe.techniques.precision,
            "optimizer": self.recipe.optimizer.type,
            "batch_size": self.recipe.loop.batch_size,
            "micro_batch_size": samples_of_a_process(self.recipe, self.memory, self.gpus)[0],
            "memory": {**memory, "total": self.memory.total},
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "largest_micro_batch": largest
            and {
                "samples": largest.samples,
                "slots": largest.plan and largest.plan.slots,
                "total": largest.plan and largest.plan.total,
                "too_large": largest.too_large,
                "settings": list(self.largest_settings),
            },
            "changes": [
                {
                    **dataclasses.asdict(made.change),
                    "saving_bytes": made.saving_bytes,
                    "total": made.plan.total,
                    "fits": made.fits,
                }
                for made in self.changes
            ],
            "formula": {**dataclasses.asdict(self.formula), "total_bytes": self.formula.total_bytes},
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
            "notices": list(self.memory.notices),
        }


@python_fixes()
def plan(
    recipe: Recipe,
    *,
    settings: Sequence[str] = (),
    gpu: str | None = None,
    gpus: int | Literal["all"] = 1,
    read_data: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Work out the memory of a run, what fits and what ``train`` would choose, without the GPU.

    The step that ``train`` would make is traced in a process of its own, on a stand-in for the GPU; neither a GPU nor
    weights are needed.

    Args:
        recipe: the whole run.
        settings: ``key=value`` changes of the recipe, as ``--set`` takes them on the command line.
        gpu: a GPU's name or an amount of memory, ``h200``, ``a100-80gb``, ``24GiB``; None: this machine's first GPU.
        gpus: GPUs, a process each, or all of this machine; with ``parallel.strategy: dp``, those that the process sees.
        read_data: read and encode the data first, as a run would, to know their lengths. Else they are taken for as
            long as they may be, unless they were encoded before.
        progress: told what is traced, each time that it takes seconds.

    Raises:
        UserError: an unknown GPU, or none; what ``train`` would say of the recipe there; a step that cannot be traced.

    Example:
        >>> paceline.plan(paceline.Recipe.load("recipes/imdb_bert_large.yaml"), gpu="v100-32gb").fits
    """
    recipe, here = recipe.with_settings(settings) if settings else recipe, this_machine()
    if gpus == "all" and gpu is not None:
        why = "all counts this machine's GPUs, and the plan is of another"
        raise UserError(f"--gpus all with --gpu {gpu}", why, f"--gpu {gpu} --gpus 8, or as many as there will be")
    chosen_gpu = gpu_for(gpu) if gpu is not None else _first_gpu(here)
    gpus = len(here.gpus) if gpus == "all" else gpus
    with Predictor() as one, Predictor() as other:

        def trace_with(predictor: Predictor) -> Trace:
            return lambda chosen, count: predictor.plan(chosen, chosen_gpu, read_data=read_data, world_size=count)

        # tracing is one thread's work, and most machines have more than one to give
        beside = None
        if here.cpu_count > 1:
            other.start()  # it imports while the first plan is made
            beside = trace_with(other)
        return planned(recipe, chosen_gpu, here, trace_with(one), beside=beside, gpus=gpus, progress=progress)


def planned(
    recipe: Recipe,
    gpu: Gpu,
    here: Facts,
    trace: Trace,
    *,
    beside: Trace | None = None,
    gpus: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of ``recipe`` on a machine like ``here`` but for its GPUs, as ``trace`` finds the memory of a run.

    Args:
        beside: the same as ``trace``, for another thread.

    Raises:
        RecipeError: the recipe is not for GPUs, or cannot run on this one.
    """
    if recipe.device == "cpu":
        raise RecipeError("device = cpu", "a plan is of a GPU's memory, and this run uses none", "--set device=auto")

    def traced(make: Trace, settings: tuple[str, ...], count: int) -> MemoryPlan:
        changed = _chosen_for(recipe.with_settings(settings), gpu, count, here)[0]
        if progress:
            progress(f"tracing the step {typed(settings, count if count != gpus else None)}".rstrip())
        return make(changed, count)

    plan_with = _Plans(traced, trace, beside, gpus)
    chosen, decisions = _chosen_for(recipe, gpu, gpus, here)
    memory = plan_with(())
    final = chosen.with_settings(f"{decision.setting}={decision.value}" for decision in memory.decisions)
    usable = None if gpu.memory_bytes is None else usable_bytes(gpu.memory_bytes)
    too_large = usable is not None and memory.total > usable
    largest: LargestMicroBatch | None = None
    settings, changes = tuple[str, ...](), tuple[TracedChange, ...]()
    with plan_with.made_ahead(single_changes(chosen, gpu) if too_large else ()):
        if usable is not None and recipe.model.train != "features":
            largest, settings = _largest(chosen, gpus, plan_with, usable)
        if usable is not None and too_large:
            most = largest.samples if largest else 0
            changes = cheapest_changes(
                plan_with, recipe=chosen, gpu=gpu, plan=memory, limit_bytes=usable, largest=most, gpus=gpus
            )
    return Plan(
        recipe=final,
        gpus=gpus,
        memory=memory,
        decisions=(*decisions, *memory.decisions),
        usable_bytes=usable,
        largest=largest,
        largest_settings=settings,
        changes=changes,
        formula=_formula(final, memory, gpus),
    )


@final
class _Plans:
    """Plans of a run with settings changed, as ``PlanWith``; each is made once.

    Args:
        make: traces with what it is given: settings, on so many GPUs.
        beside: the same as ``trace``, for another thread; None: there is none.
        gpus: GPUs, where no other number is given.
    """

    def __init__(
        self,
        make: Callable[[Trace, tuple[str, ...], int], MemoryPlan],
        trace: Trace,
        beside: Trace | None,
        gpus: int,
    ) -> None:
        self._make, self._trace, self._beside, self._gpus = make, trace, beside, gpus
        self._made: dict[tuple[tuple[str, ...], int], MemoryPlan] = {}
        self._coming: dict[tuple[tuple[str, ...], int], Future[MemoryPlan]] = {}

    def __call__(self, settings: tuple[str, ...], gpus: int | None = None, /) -> MemoryPlan:
        key = settings, gpus or self._gpus
        if key not in self._made:
            coming = self._coming.get(key)
            # what has not begun there is as well done here
            if coming is None or coming.cancel():
                self._made[key] = self._make(self._trace, *key)
            else:
                self._made[key] = coming.result()
        return self._made[key]

    @contextlib.contextmanager
    def made_ahead(self, changes: Iterable[Change]) -> Iterator[None]:
        """Inside, plans with these changes are made in another thread, one after the other, until they are wanted."""
        with ThreadPoolExecutor(1, "paceline-trace") as ahead:
            if self._beside is not None:
                for change in changes:
                    key = change.settings, change.gpus or self._gpus
                    self._coming[key] = ahead.submit(self._make, self._beside, *key)
            yield
            for coming in self._coming.values():
                coming.cancel()


def _chosen_for(recipe: Recipe, gpu: Gpu, gpus: int, here: Facts) -> tuple[Recipe, tuple[Decision, ...]]:
    """What ``train`` would choose on a machine like ``here`` with so many of this GPU."""
    strategy = recipe.parallel.strategy
    if one_process(strategy) and gpus == 1:
        why = "it splits a batch over several GPUs, and a plan is of one unless it is told"
        raise RecipeError(f"parallel.strategy = {strategy}", why, "--gpus 2, or as many as the process will see")
    return choose(recipe, facts_with([gpu] * gpus, here), num_processes(recipe, gpus))


def _formula(recipe: Recipe, memory: MemoryPlan, gpus: int) -> Textbook:
    return textbook(
        memory.num_parameters,
        memory.num_trained,
        precision=recipe.techniques.precision,
        optimizer=recipe.optimizer.type,
        momentum=recipe.optimizer.momentum,
        rounding=recipe.optimizer.rounding,
        num_shards=(recipe.parallel.shard_size or gpus) if shards(recipe.parallel.strategy) else 1,
    )


def _first_gpu(here: Facts) -> Gpu:
    if here.gpus:
        return here.gpus[0]
    why = f"{here.cuda_problem}, and a plan is of a GPU"
    raise UserError("--gpu: missing", why, "--gpu h200, the name of a GPU; or its memory: --gpu 24GiB")


def _largest(chosen: Recipe, gpus: int, plan_with: PlanWith, usable: int) -> tuple[LargestMicroBatch, tuple[str, ...]]:
    """The search's end, and the settings that lead there."""
    now, share = samples_of_a_process(chosen, plan_with(()), gpus)

    def settings(samples: int) -> tuple[str, ...]:
        plain = () if samples == now else (f"loop.micro_batch_size={samples}",)
        found = plan_with(plain)
        # evaluations do not shrink with the micro-batch
        if found.total > usable and found.moment == "evaluation":
            return (*plain, f"loop.evaluation_batch_size={samples}")
        return plain

    def plan_of(samples: int) -> MemoryPlan | None:
        try:
            return plan_with(settings(samples))
        except UserError:
            return None

    found = largest_micro_batch(plan_of, start=now, most=share, limit_bytes=usable)
    if found.plan is not None and found.too_large is None:
        found = dataclasses.replace(found, samples=found.plan.samples)  # there may be fewer than a batch
    return found, settings(found.samples) if found.samples else ()


def typed(settings: Iterable[str], gpus: int | None = None) -> str:
    """What to type for these settings."""
    return " ".join([*([f"--gpus {gpus}"] if gpus else []), *(f"--set {setting}" for setting in settings)])


def model_name(recipe: Recipe) -> str:
    """Where the model comes from, in a word."""
    part = recipe.model
    if part.source or part.factory:
        return str(part.source or part.factory)
    return f"{(part.config or {}).get('model_type')} with random weights"
