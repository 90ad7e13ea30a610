"""A run's steps on a GPU that is not there: what they allocate, in the order of the run.

The run is put together by the very functions that ``train`` uses, ``assemble_build`` and ``assemble``, and its engine
makes the steps that have the most memory in them: the largest micro-batch, one of another shape (which runs eagerly
while the first is captured), and the largest batch of an evaluation. So a plan cannot drift from the engine.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.contract.records import Decision
from paceline.data.dataset import Dataset
from paceline.engine.evaluate import largest_batch
from paceline.engine.statistics import fewest_together
from paceline.engine.torch_engine import TorchEngine
from paceline.machine.facts import Gpu, this_machine
from paceline.machine.gpus import facts_with
from paceline.memory import attention
from paceline.memory.ledger import Allocation, Ledger
from paceline.memory.stand_in import stand_in
from paceline.memory.subject import Subject
from paceline.memory.world import planned_world
from paceline.models.structure import parameter_counts
from paceline.prepare.assemble import Assembled, assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import build_for, model_for
from paceline.recipe import Recipe
from paceline.recipe.choose import choose_strategy
from paceline.seams import Alone, Batch, Ids, Layout, Mesh, Size, StepInput
from paceline.techniques.compile import fused


@dataclass(frozen=True)
class Trace:
    """What one rank allocates and frees, from the model's first weight to an evaluation."""

    allocations: Sequence[Allocation]
    events: Sequence[int | None]
    """n: ``allocations[n]`` is made; ~n: it is freed; None: the allocator gives back what it has cached."""
    execution: Mapping[str, str]
    decisions: tuple[Decision, ...]
    samples: int
    """Samples of the largest micro-batch."""
    slots: int
    """Its positions; of images their number."""
    attention: tuple[str, ...]
    """Kernels of ``scaled_dot_product_attention`` that were assumed."""
    num_parameters: int
    num_trained: int
    world_size: int = 1
    normalises_batches: bool = False
    """Whether the model has a batch normalisation."""


def trace(subject: Subject, gpu: Gpu, world_size: int = 1) -> Trace:
    """Trace one rank of the subject's run on ``gpu``, in a process that does nothing else, see ``stand_in``.

    Args:
        world_size: ranks that share each batch; the first one's share is traced, of equally many samples as any.

    Raises:
        ModelError, RecipeError: what ``train`` would say of this model and these settings.
        Exception: of torch, from an operator that says nothing about its result's size without data.
    """
    world = Alone() if world_size == 1 else planned_world(world_size)
    part = subject.recipe.parallel
    model, mesh = model_of(subject), Mesh.over(world, tensor=part.tensor, pipe=part.pipeline)
    subject = _with_strategy(subject, model, gpu, world_size)
    recipe, dataset = subject.recipe, subject.dataset
    whole, trained = parameter_counts(model)  # of the model, of which a rank may keep a share
    gc.disable()  # what is freed is freed at once, cycles apart: those would be freed at moments that vary
    try:
        with stand_in(gpu) as (device, ledger):
            assembled, decisions = _assembled(subject, model, device, ledger, mesh)
            execution = assembled.build.execution
            attention.chosen.clear()  # by the comparison of packed and padded batches
            if recipe.model.train == "features":  # no steps: every sample goes through the model as in an evaluation
                largest = _evaluate(assembled, recipe, dataset, ledger, ("train", "validation", "test"))
            else:
                course = Course(recipe, dataset, assembled.build, mesh)
                largest = _train(assembled, recipe, course, ledger, mesh.data.size)
                _evaluate(assembled, recipe, dataset, ledger, ("validation", "test"))
            size = assembled.build.layout.size(largest)
            return Trace(
                allocations=tuple(ledger.allocations),
                events=tuple(ledger.events),
                execution={**execution, **fused(assembled.build.model), **assembled.engine.execution},
                decisions=decisions,
                samples=len(largest),
                slots=size.slots,
                attention=tuple(attention.chosen),
                num_parameters=whole,
                num_trained=trained,
                world_size=world_size,
                normalises_batches=fewest_together(model) > 1,
            )
    finally:
        gc.enable()
        torch._dynamo.reset()


def model_of(subject: Subject) -> nn.Module:
    """The subject's model with no memory behind its weights; a factory's model has some, on the host."""
    with contextlib.nullcontext() if subject.recipe.model.factory else torch.device("meta"):
        return model_for(subject.recipe, subject.config, subject.dataset, _vocabulary(subject), weights=False)


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with all weights and buffers on ``device``; those that it shares stay shared."""
    made: dict[Tensor, Tensor] = {}

    def on_device(tensor: Tensor) -> Tensor:
        if tensor not in made:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[tensor] = nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
        return made[tensor]

    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            held.update({name: on_device(tensor) for name, tensor in held.items() if tensor is not None})
    return model


def _with_strategy(subject: Subject, model: nn.Module, gpu: Gpu, world_size: int) -> Subject:
    """How the ranks share the model, as a run decides it once the model is there."""
    whole, trained = parameter_counts(model)
    facts = facts_with([gpu] * world_size, this_machine())
    recipe, decisions = choose_strategy(
        subject.recipe, subject.decisions, facts, world_size, num_parameters=whole, num_trained=trained
    )
    return replace(subject, recipe=recipe, decisions=decisions)


def _assembled(
    subject: Subject, model: nn.Module, device: torch.device, ledger: Ledger, mesh: Mesh
) -> tuple[Assembled, tuple[Decision, ...]]:
    recipe = subject.recipe
    with ledger.during("model"):
        model = placed(model, device)
    ledger.name("parameters", model.parameters())
    ledger.name("buffers", model.buffers())
    with ledger.during("preparation"):
        build = build_for(recipe, model, subject.dataset, device, mesh=mesh)
    gc.collect()
    recipe = recipe.with_settings(f"{decision.setting}={decision.value}" for decision in build.decisions)
    build = replace(build, layout=_Noted(build.layout, ledger))
    with ledger.during("optimizer"):
        assembled = assemble(recipe, build, total_steps=3, mesh=mesh)
    # weights may have moved into buffers of the optimizer's
    ledger.name("parameters", map(_own, model.parameters()))
    _name_gradients(model, ledger)
    if isinstance(assembled.engine, TorchEngine) and assembled.engine.ema is not None:
        ledger.name("average", assembled.engine.ema.shadow)
    return assembled, (*subject.decisions, *build.decisions)


def _name_gradients(model: nn.Module, ledger: Ledger) -> None:
    ledger.name("gradients", [_own(p.grad) for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def _own(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if is_traceable_wrapper_subclass(tensor) else tensor


def _vocabulary(subject: Subject) -> int | None:
    if subject.dataset.is_images:
        return None
    if subject.recipe.data.source == "builtin:random":
        return subject.recipe.data.random.vocabulary
    given: int | None = (
        None if subject.config is None else getattr(subject.config.get_text_config(), "vocab_size", None)
    )
    return given


def _train(assembled: Assembled, recipe: Recipe, course: Course, ledger: Ledger, num_shares: int) -> Ids:
    """What the loop does to its first steps; returns the samples of the largest micro-batch."""
    engine = assembled.engine
    shapes = course.largest_of_each_shape()
    (largest,) = shapes[0].microbatches
    pieces = -(-recipe.loop.batch_size // (num_shares * max(len(largest), 1)))
    if course.warms_up(assembled.build.device):
        with ledger.during("forward"):
            engine.warm_up(shapes[0])
    # the largest once more, beside the states that some optimizers make in their first update
    most = engine.most_together if isinstance(engine, TorchEngine) else 2
    for shape in (*shapes[:2], shapes[0]):
        with ledger.during("forward"):
            engine.accumulate(_times(shape, min(pieces, most), recipe.loop.batch_size))
        _name_gradients(assembled.build.model, ledger)
        with ledger.during("update"):
            engine.update()
    return largest


def _times(given: StepInput, count: int, denominator: int) -> StepInput:
    """A step of ``count`` micro-batches like the one that is given."""
    all_of = {name: getattr(given, name) * count for name in ("microbatches", "widths", "partners")}
    return replace(given, denominator=denominator, **all_of)


def _evaluate(assembled: Assembled, recipe: Recipe, dataset: Dataset, ledger: Ledger, names: Collection[str]) -> Ids:
    """The largest batch of these splits goes through the model without gradients; it is returned."""
    layout, size = assembled.build.layout, recipe.loop.evaluation_batch_size or recipe.loop.batch_size
    ids = largest_batch(layout, dataset.splits, size, names)
    if ids is None:
        return np.empty(0, np.int64)
    batch = layout.collate(ids)
    with ledger.during("evaluation"):
        assembled.engine.infer(batch)
        if averaged := assembled.engine.averaged():
            with averaged:
                assembled.engine.infer(batch)
    return ids


@final
class _Noted(Layout):
    """A layout whose batches the ledger knows as such."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self._layout, self._ledger = layout, ledger
        self.widens_by = layout.widens_by

    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch:
        with self._ledger.during("batch"):
            return self._layout.collate(ids, draw, slots=slots)

    def over(self, inputs: Any, labels: Any) -> Layout:
        return self._layout.over(inputs, labels)

    def size(self, ids: Ids) -> Size:
        return self._layout.size(ids)

    def sorted(self, ids: Ids) -> Ids:
        return self._layout.sorted(ids)

    def batches(self, ids: Ids, batch_size: int) -> list[Ids]:
        return self._layout.batches(ids, batch_size)

    def close(self) -> None:
        self._layout.close()
