"""A run put together, top to bottom: what each technique does and why it comes where it does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.layout import ImageLayout, PaddedLayout
from paceline.engine.engine import Engine
from paceline.engine.optimizer import ParameterGroup, build_optimizer, parameter_groups
from paceline.engine.scaling import Dynamic, Unscaled
from paceline.engine.schedule import rate_table
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.updates import DeviceGated, HostGated
from paceline.errors import ModelError
from paceline.recipe import Recipe
from paceline.seams import Batch, Build, Forward, Layout, Task
from paceline.techniques import precision, recompute


@dataclass(frozen=True)
class Assembled:
    """What the loop drives."""

    build: Build
    engine: Engine
    groups: Sequence[ParameterGroup]
    rates: NDArray[np.float64]
    """[steps, groups]: learning rate of each applied update."""


def assemble_build(
    recipe: Recipe,
    model: nn.Module,
    dataset: Dataset,
    task: Task,
    device: torch.device,
    *,
    blocks: Sequence[nn.Module],
    normalisation: tuple[tuple[float, ...], tuple[float, ...]],
) -> Build:
    """Model, data and techniques, without an optimizer; enough to evaluate and to predict."""
    model = model.to(device)
    parameters = inspect.signature(model.forward).parameters
    layout = layout_for(dataset, device, token_types="token_type_ids" in parameters, normalisation=normalisation)
    build = Build(
        model=model, forward=forward_for(model), layout=layout, task=task, device=device, blocks=tuple(blocks)
    )
    # recompute takes hold of single blocks, so it comes before anything that wraps the whole forward pass
    if recipe.techniques.recompute:
        build = recompute.apply(build)
    # autocast wraps the whole forward pass; recomputed blocks restore the autocast state they were first run under
    return precision.apply(build, recipe.techniques.precision)


def assemble(recipe: Recipe, build: Build, total_steps: int) -> Assembled:
    """The build with its optimizer and learning rates, in an engine."""
    part = recipe.optimizer
    groups = parameter_groups(list(build.model.named_parameters()), part, recipe.schedule)
    rates = rate_table([group.lr for group in groups], [group.schedule for group in groups], total_steps)
    # torch's fused kernels read gate and learning rate from the device; on a CPU reading them on the host is free
    # and gives the bits of the plain optimizer
    fused = build.device.type == "cuda" and part.type != "adamw8bit"
    optimizer = build_optimizer(groups, part, fused=fused)
    updates = DeviceGated(optimizer, rates, build.device) if fused else HostGated(optimizer, rates)
    engine = TorchEngine(
        build.model,
        objective_for(build),
        lambda batch: build.forward(build.model, batch),
        updates,
        Dynamic(build.device) if build.loss_scaling else Unscaled(),
        clip_norm=part.clip_norm,
        seed=recipe.seed,
    )
    return Assembled(build, engine, groups, rates)


def objective_for(build: Build) -> Any:
    """Batch -> (loss sum, number of right predictions): what the step differentiates."""

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        logits = build.forward(build.model, batch)
        return build.task.loss_sum(logits, batch), build.task.correct(logits.detach(), batch)

    return objective


def layout_for(
    dataset: Dataset,
    device: torch.device,
    *,
    token_types: bool,
    normalisation: tuple[tuple[float, ...], tuple[float, ...]],
) -> Layout:
    """The layout that fits the data set's inputs."""
    match dataset.inputs:
        case Tokens() as tokens:
            return PaddedLayout(tokens, dataset.labels, device, token_types=token_types)
        case Images() as images:
            mean, deviation = normalisation
            return ImageLayout(images, dataset.labels, device, mean=mean, deviation=deviation)


def forward_for(model: nn.Module) -> Forward:
    """How this model is called: by keyword where it names our inputs, else with its one input.

    Raises:
        ModelError: from the forward pass, when the model's inputs are not ours.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        known = {name: value for name, value in batch.inputs.items() if takes_any or name in parameters}
        if known:
            output = model(**known)
        elif len(parameters) >= 1 and len(batch.inputs) == 1:
            output = model(*batch.inputs.values())
        else:
            raise ModelError(
                f"the model's forward takes {', '.join(parameters) or 'nothing'}",
                f"this data gives {', '.join(batch.inputs)}",
                "name the forward's parameters so",
            )
        return getattr(output, "logits", output)  # type: ignore[no-any-return]

    return forward
