"""How the ranks or devices of a run share its model and its work: the seam, and what most strategies are made of."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import nn

from paceline.engine.capture import Agree, Captured, Phase, alone
from paceline.engine.passes import Passes
from paceline.engine.runner import Eager
from paceline.engine.step import Objective, Step
from paceline.engine.torch_engine import TorchEngine
from paceline.models.masks import unread_masks
from paceline.optim.gradients import Gradients
from paceline.optim.optimizer import ParameterGroup
from paceline.optim.scaling import Dynamic, Unscaled
from paceline.optim.state import NOT_SPLIT, Splitting
from paceline.optim.updates import Updates
from paceline.recipe import Recipe
from paceline.seams import Build, Engine, Ids, Layout, Mesh, StepInput
from paceline.techniques import compile


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an engine is made of beside the build."""

    recipe: Recipe
    objective: Objective
    groups: Sequence[ParameterGroup]
    rates: NDArray[np.float64]
    """[steps, groups]: learning rate of each applied update."""
    capturing: Phase = contextlib.nullcontext
    """Counts the seconds of capturing graphs."""
    bucket_mib: int | None = None
    """MiB of gradients that are summed in one go, where the recipe does not say; None: as much as suits any link."""


class Strategy(ABC):
    """How the ranks or devices of a run share its model and its work.

    A strategy is a room of its own, an entry in the catalogue, and nothing else: no module above ``strategies`` names
    one. Its methods are called once a run and in this order, but ``share``, once a step. All ranks call them together.

    Args:
        mesh: the ranks of the run.
        recipe: of the run, checked against this machine.
    """

    def __init__(self, mesh: Mesh, recipe: Recipe) -> None:
        self.mesh, self.recipe = mesh, recipe

    def why_not_retried(self) -> str:
        """Why a step that ran out of memory cannot be made again in smaller micro-batches; empty where it can."""
        return ""

    def cut(self, build: Build) -> Build:
        """Cut the model into what each rank computes by itself, before any technique has changed how it computes.

        Raises:
            RecipeError: the model or the number of ranks does not suit.
        """
        return build

    def prepare(self, build: Build) -> Build:
        """Shard, wrap or move the model, after every technique has been applied.

        Raises:
            RecipeError: the model or the number of ranks does not suit.
        """
        return build

    @abstractmethod
    def engine(self, build: Build, training: Training) -> Engine:
        """What carries out the steps."""

    def share(self, given: StepInput, of_all_ranks: Callable[[], Sequence[Ids]], layout: Layout) -> StepInput:
        """A step's input with what only this strategy needs; every rank calls it for every step, and asks nobody.

        Args:
            given: this rank's micro-batches.
            of_all_ranks: the micro-batches of every rank, rank by rank.
            layout: knows their sizes.
        """
        return given


def torch_engine(
    build: Build,
    training: Training,
    updates: Updates,
    gradients: Gradients,
    mesh: Mesh,
    *,
    agree: Agree = alone,
    not_captured: str = "",
    splitting: Splitting = NOT_SPLIT,
    passes: Passes | None = None,
    abandon: Callable[[nn.Module], None] = lambda model: None,
) -> TorchEngine:
    """The engine of one device, alone or as one rank of several.

    Args:
        agree: where ranks meet inside passes: whether a flag is set on any of them.
        not_captured: why steps are not captured, beside the reasons that hold for every strategy.
        splitting: how tensors that ranks hold in pieces leave and enter whole.
        passes: makes the passes of a step; None: forward and backward of one micro-batch after the other.
        abandon: forgets a pass that an exception broke off on all ranks.
    """
    recipe = training.recipe
    if recipe.optimizer.ema is not None:
        updates.keep(recipe.optimizer.ema)
    reason = not_captured or ("" if recipe.techniques.capture is True else _not_captured(build))
    return TorchEngine(
        build.model,
        Step(
            training.objective,
            gradients,
            Dynamic(build.device, recipe.optimizer.loss_scale, _tables(build.model))
            if build.loss_scaling
            else Unscaled(),
            updates,
            recipe.optimizer.clip_norm,
        ),
        lambda batch: build.forward(build.model, batch),
        Eager(reason)
        if reason
        else Captured(build.device, partial(_counted, training.capturing), agree=agree, idle=mesh.data.size > 1),
        build.layout.collate,
        seed=recipe.seed,
        degrade=partial(_degraded, build, recipe, abandon),
        world=mesh.data,
        splitting=splitting,
        passes=passes,
    )


def _tables(model: nn.Module) -> list[nn.Parameter]:
    """Weights of embeddings, of which a batch uses few rows."""
    return [
        parameter for module in model.modules() if isinstance(module, nn.Embedding) for parameter in module.parameters()
    ]


@contextlib.contextmanager
def _counted(capturing: Phase) -> Iterator[None]:
    """Around each capture of a graph."""
    with capturing(), unread_masks():
        yield


def _not_captured(build: Build) -> str:
    return "there are no CUDA graphs on a CPU" if build.device.type == "cpu" else "techniques.capture is off"


def _degraded(
    build: Build, recipe: Recipe, abandon: Callable[[nn.Module], None], error: Exception
) -> Mapping[str, str]:
    """How steps are carried out when the first pass fails: without what failed, where that was ours to choose.

    Raises:
        RecipeError: it was asked for.
        Exception: ``error`` itself, when nothing here is to blame.
    """
    traces = recipe.techniques.compile is not False or recipe.techniques.fusion is True
    if not traces or compile.reason_of(error) is None:
        raise error
    abandon(build.model)
    # the recipe says true by now also where it was left to us
    chosen = any(decision.setting == compile.SETTING for decision in build.decisions)
    execution = compile.fall_back(build, "auto" if chosen else True, error).execution
    return {name: execution[name] for name in ("compile", "fusion") if name in execution}
