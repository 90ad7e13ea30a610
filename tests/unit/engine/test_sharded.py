"""Gradients and updates of shards: what their norm is, whose they are, and what is noticed when they are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.optim.optimizer import ParameterGroup
from paceline.recipe.parts import OptimizerPart, SchedulePart
from paceline.seams import World
from paceline.strategies.fsdp.gradients import ShardedGradients, build_sharded_updates, shards_of
from paceline.strategies.fsdp.shard import apply_fsdp, mesh_of, whole
from tests.testing.distributed import run_distributed

CPU = torch.device("cpu")


def made(world: World, shard_size: int, value: float = 1.0) -> tuple[nn.Module, Any, Any]:
    """A layer of 5 x 3, of which every gradient is ``value`` times the number of ranks; its updates and gradients."""
    model = nn.Linear(3, 5, bias=False)
    nn.init.ones_(model.weight)
    apply_fsdp(model, [], mesh_of(CPU, world.size, shard_size))
    group = ParameterGroup("all", (model.weight,), 0.1, 0.0, SchedulePart())
    updates, gradients = build_sharded_updates(
        model, [group], OptimizerPart(type="sgd", momentum=0.5), np.full((4, 1), 0.1), CPU, world
    )
    gradients.add(model(torch.ones(1, 3)).sum() * value, first=True, last=True)
    return model, updates, gradients


def norms(world: World, value: float) -> list[float]:
    return [made(world, size, value)[2].norm().item() for size in (2, 4)]


@pytest.mark.parametrize("value", [1.0, 1e-30])
def test_the_norm_counts_every_number_once(value: float) -> None:
    """In shards of which some are empty, in groups that hold the same, where fp32 has no room for squares."""
    for found in run_distributed(norms, 4, value):
        assert found == pytest.approx([4 * value * 15**0.5] * 2, rel=1e-6)


def states(world: World) -> tuple[dict[str, list[int]], dict[str, float], list[str], int]:
    model, updates, gradients = made(world, 2)
    names = {model.weight: "weight"}
    before = list(updates.tensors(names))
    updates.apply(gradients, torch.tensor(0.5), torch.tensor(True))
    updates.apply(gradients, torch.tensor(1.0), torch.tensor(False))
    found = dict(whole(updates.tensors(names)))
    shapes = {name: list(tensor.shape) for name, tensor in found.items()}
    values = {name: tensor.mean().item() for name, tensor in found.items()}
    assert updates.parameters == (model.weight,)
    return shapes, values, before, updates.applied


def test_states_are_named_and_shaped_as_the_whole_weights() -> None:
    for shapes, values, before, applied in run_distributed(states, 2):
        assert before == []
        assert shapes == {"weight.momentum_buffer": [5, 3]}
        assert values == {"weight.momentum_buffer": 1.0}, "2 ranks, times one half, once"
        assert applied == 1, "an update that was not finite is counted"


def moved(world: World) -> str:
    model = nn.Linear(3, 4)
    apply_fsdp(model, [], mesh_of(CPU, world.size, world.size))
    shards = shards_of(list(model.parameters()))
    gradients = ShardedGradients(model, shards, world, copies=1, device=CPU)
    for shard in shards.values():
        shard.data = shard.data.clone()
    with pytest.raises(RuntimeError) as found:
        gradients.add(model(torch.ones(1, 3)).sum(), first=True, last=True)
    return str(found.value)


def test_a_weight_that_has_moved_is_noticed() -> None:
    for message in run_distributed(moved, 2):
        assert "has moved" in message


def not_yet(world: World) -> tuple[bool, float]:
    """Nothing is summed before the last micro-batch, and then all of them are."""
    model, _, gradients = made(world, 2)
    for last in (False, True):
        gradients.add(model(torch.ones(1, 3)).sum() * (1 + world.rank), first=not last, last=last)
        if not last:
            assert not dict(whole({"weight": model.weight.grad}))["weight"].any(), "summed before the last"
    found = dict(whole({"weight": model.weight.grad}))["weight"]
    return bool((found == found[0, 0]).all()), found[0, 0].item()


def test_ranks_sum_once_a_step() -> None:
    assert run_distributed(not_yet, 2) == [(True, 6.0)] * 2
