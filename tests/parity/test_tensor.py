"""A model whose blocks are cut over ranks is trained as one process trains it: losses, gradients and weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import ModelError, RecipeError
from paceline.data.dataset import Dataset
from paceline.data.order import OrderState, ShuffledOrder
from paceline.models.structure import blocks
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Alone, Mesh, World
from paceline.strategies.tensor.cut import cuts_of
from paceline.tasks import task_for
from paceline.testing.distributed import run_distributed
from tests.parity import driving, reference
from tests.parity.tiny_families import configuration

STEPS = 10
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same on all ranks and in one process."""

    family: str = "distilbert"
    settings: tuple[tuple[str, Any], ...] = ()
    techniques: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 10
    micro_batch_size: int | None = 3
    clip_norm: float | None = 0.5
    optimizer: str = "sgd"
    train: str = "all"

    def recipe(self, tensor: int = 1) -> Recipe:
        plain = driving.recipe(
            techniques={**driving.PLAIN, **dict(self.techniques)},
            # Adam divides by the size of a gradient, which blows up the rounding of those that are nothing else
            optimizer={"clip_norm": self.clip_norm, "type": self.optimizer, "lr": 0.02 if self.optimizer == "sgd" else 1e-3},
            loop={"batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size, "max_steps": STEPS},
        )
        return Recipe.parse({**plain.plain(), "parallel": {"tensor": tensor}})


@dataclass(frozen=True)
class Outcome:
    """Of a few steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the last step, as this rank holds them."""
    weights: dict[str, Tensor]
    """Whole, on the first rank."""
    held: dict[str, Tensor]
    """As this rank holds them."""
    cut: list[str]
    execution: dict[str, str]


def model_of(case: Case, seed: int = 5) -> nn.Module:
    import transformers

    config = configuration(case.family, num_labels=reference.CLASSES, **dict(case.settings))
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    kind = (
        transformers.AutoModelForImageClassification
        if case.family in IMAGES
        else transformers.AutoModelForSequenceClassification
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = kind.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():  # biases begin as zeros, and two of them added look like one
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(case.train == "all")
    return model


IMAGES = ("vit", "dinov2")


def data_of(case: Case) -> Dataset:
    data = driving.dataset()
    if case.family not in IMAGES:
        return data
    pixels = np.random.default_rng(1).integers(0, 256, (reference.SAMPLES, 32, 32, 3), dtype=np.uint8)
    return replace(data, inputs=pixels)


def assembled(case: Case, mesh: Mesh, seed: int = 5) -> Assembled:
    chosen, model, data = case.recipe(mesh.tensor.size), model_of(case, seed), data_of(case)
    build = assemble_build(
        chosen,
        model,
        data,
        task_for(data.kind, data.label_names, chosen.task),
        torch.device("cpu"),
        blocks=[block for _, block in blocks(model)],
        normalisation=((0.5,) * 3, (0.5,) * 3),
        mesh=mesh,
    )
    return assemble(chosen, build, STEPS, mesh=mesh)


def train(case: Case, run: Assembled, mesh: Mesh, steps: int = STEPS, first: int = 0) -> Outcome:
    data, chosen = data_of(case), case.recipe()
    size = chosen.loop.micro_batch_size or chosen.loop.batch_size
    order = ShuffledOrder(np.arange(reference.SAMPLES), micro_batch_size=size, lengths=getattr(data.inputs, "lengths", None))
    at = OrderState(seed=0, epoch=0, step=0, batch_size=chosen.loop.batch_size)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(first + steps):
        if step >= first:
            plan = order.plan(at, mesh.data.rank, mesh.data.size)
            batches = [run.build.layout.collate(ids) for ids in plan.microbatches]
            done = run.engine.accumulate_batches(batches, len(plan.samples), step=step)
            named = run.build.model.named_parameters()
            gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            norms.append(run.engine.update().norm.item())
            losses.append(mesh.data.all_reduce(done.loss.clone()).item())
        at = order.after(at)
    whole = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    held = {name: p.detach().clone() for name, p in run.build.model.named_parameters()}
    return Outcome(
        losses, norms, gradients, whole, held, sorted(cuts_of(run.build.model)), dict(run.build.execution)
    )


def together(world: World, case: Case, tensor: int = 2) -> Outcome:
    mesh = Mesh.over(world, tensor=tensor)
    return train(case, assembled(case, mesh, seed=5 + world.rank), mesh)  # ranks begin with other weights


def alone(case: Case) -> Outcome:
    return train(case, assembled(case, Mesh()), Mesh())


def assert_same(found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE) -> None:
    first = found[0]
    assert first.weights.keys() == expected.weights.keys()
    for one in found:
        assert one.losses == pytest.approx(expected.losses, rel=tolerance)
        assert one.norms == pytest.approx(expected.norms, rel=10 * tolerance)
        assert one.cut == first.cut
        assert one.cut, "nothing was cut"
        for name, gradient in one.gradients.items():
            if name not in one.cut:
                assert torch.equal(gradient, first.gradients[name]), f"ranks differ in the gradient of {name}"
                assert torch.equal(one.held[name], first.held[name]), f"ranks differ in {name}"
    for name, weight in expected.weights.items():
        away = float((first.weights[name] - weight).abs().max())
        assert away < tolerance, f"{name} is {away:.1e} from one process's"


FAMILIES = ["bert", "distilbert", "roberta", "xlm-roberta", "electra", "modernbert", "vit"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_that_share_blocks_train_as_one_process(family: str) -> None:
    case = Case(family)
    assert_same(run_distributed(together, 2, case), alone(case))
