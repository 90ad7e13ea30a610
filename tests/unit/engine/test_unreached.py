"""Weights that the loss never reaches are found, whatever hides them, and nothing is left behind by looking."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.engine.assemble import forward_for
from paceline.engine.optimizer import parameter_groups
from paceline.engine.unreached import unreached_notice, unreached_weights
from paceline.recipe.parts import OptimizerPart, SchedulePart
from paceline.seams import Batch, Build

CPU = torch.device("cpu")


class Net(nn.Module):
    """Reads four numbers; ``pooler`` is used by nobody, ``norm`` keeps running statistics."""

    def __init__(self, *, recomputes: bool = False, only_in: bool | None = None) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.pooler = nn.Linear(4, 4)
        self.recomputes, self.only_in = recomputes, only_in

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = pixel_values + 0 * pixel_values.requires_grad_(self.recomputes)
        hidden = checkpoint(self.body, hidden, use_reentrant=True) if self.recomputes else self.body(hidden)
        if self.training is self.only_in:
            hidden = self.pooler(hidden)
        self.seen = hidden.shape
        return self.head(self.norm(nn.functional.dropout(hidden, 0.5, self.training)))


def build(model: nn.Module) -> Build:
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    class Layout:
        def collate(self, ids: Any) -> Batch:
            return Batch({"pixel_values": inputs[ids].clone()}, torch.tensor([0, 1])[: len(ids)], torch.ones(len(ids)))

    class Task:
        def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
            return nn.functional.cross_entropy(logits, batch.labels, reduction="sum")

    return Build(model=model, forward=forward_for(model, CPU), layout=Layout(), task=Task(), device=CPU)  # type: ignore[arg-type]


def found(model: nn.Module) -> tuple[str, ...]:
    return unreached_weights(build(model), np.arange(2))


def test_those_without_a_gradient_are_found() -> None:
    assert found(Net()) == ("pooler.weight", "pooler.bias")


@pytest.mark.parametrize("only_in", [True, False], ids=["training", "evaluation"])
def test_one_that_either_training_or_evaluation_uses_is_reached(only_in: bool) -> None:
    assert found(Net(only_in=only_in)) == ()


def test_recomputation_that_hides_weights_from_the_graph_hides_none_here() -> None:
    assert found(Net(recomputes=True)) == ("pooler.weight", "pooler.bias")


def test_frozen_weights_are_nobodys_business() -> None:
    model = Net()
    model.pooler.requires_grad_(False)
    assert found(model) == ()


def test_a_pass_that_fails_leaves_it_to_the_first_step() -> None:
    model = Net()
    model.head = nn.Linear(3, 2)
    assert found(model) == ()


def test_model_gradients_and_random_numbers_stay_as_they_are() -> None:
    model = Net()
    model.body.weight.grad = torch.full((4, 4), 7.0)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert found(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["body.weight"]
    assert model.body.weight.grad.eq(7).all()
    assert model.training
    assert "seen" not in model.__dict__


@pytest.mark.parametrize("decay_all", [False, True])
def test_they_do_not_decay(decay_all: bool) -> None:
    model = Net()
    names = frozenset(("pooler.weight", "pooler.bias"))
    part = OptimizerPart(weight_decay=0.1, decay_all=decay_all)
    groups = parameter_groups(list(model.named_parameters()), part, SchedulePart(), names)
    decays = {id(p): group.weight_decay for group in groups for p in group.parameters}
    assert {n for n, p in model.named_parameters() if not decays[id(p)]} >= names
    assert decays[id(model.body.weight)] == 0.1


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_notice_names_the_first_ones(number: int) -> None:
    names = tuple(itertools.islice((f"layer.{i}" for i in itertools.count()), number))
    told = unreached_notice(names)
    assert told.startswith(f"{number} weight")
    assert "layer.0" in told
    assert ("..." in told) == (number > 3)
