"""Rounding of updates in bf16 on a GPU: a captured update has the bits of an eager one, with new noise each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.optim.gradients import FlatGradients
from paceline.optim.updates import FlatUpdates, Updates, build_updates
from paceline.recipe.parts import OptimizerPart
from tests.gpu.test_flat_update import CUDA, captured
from tests.gpu.waiting import waits_are_errors
from tests.parity.test_flat_update import groups_of

STEPS = 6


def made(rounding: str, kind: str = "adamw") -> tuple[nn.Module, Updates, FlatGradients]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 7)).to(CUDA, torch.bfloat16)
    part = OptimizerPart(type=kind, lr=1e-4, rounding=rounding)
    groups = groups_of(model, part)
    updates, gradients = build_updates(groups, part, np.full((STEPS, len(groups)), 1e-4), CUDA)
    assert isinstance(updates, FlatUpdates)
    return model, updates, gradients


def put(model: nn.Module, step: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(step)
    for parameter in model.parameters():
        parameter.grad.normal_(generator=generator)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_a_captured_update_has_the_bits_of_an_eager_one(rounding: str, kind: str) -> None:
    eager, eager_updates, eager_gradients = made(rounding, kind)
    replayed, updates, gradients = made(rounding, kind)
    eager_updates.rehearse()
    updates.rehearse()
    replay = captured(updates, gradients)
    for step in range(STEPS):
        put(eager, step)
        put(replayed, step)
        with waits_are_errors():
            norm = eager_gradients.norm()
            factor = (0.05 / (norm + 1e-6)).clamp(max=1.0)
            eager_updates.apply(eager_gradients, factor, norm.isfinite())
            replay()
    assert updates.applied == eager_updates.applied == STEPS
    for (name, one), other in zip(eager.state_dict().items(), replayed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(eager[0].weight, made("nearest", kind)[0][0].weight), "nothing was trained"


def test_tiny_updates_arrive() -> None:
    model = nn.Linear(256, 256, bias=False, device=CUDA, dtype=torch.bfloat16)
    found = {}
    for rounding in ("nearest", "kahan", "stochastic"):
        nn.init.ones_(model.weight)
        part = OptimizerPart(type="sgd", lr=1e-5, momentum=0.0, nesterov=False, rounding=rounding)
        updates, gradients = build_updates(groups_of(model, part), part, np.full((1, 1), 1e-5), CUDA)
        for _ in range(1000):
            model.weight.grad.fill_(-1.0)
            updates.apply(gradients, torch.ones((), device=CUDA), torch.tensor(True, device=CUDA))
        found[rounding] = model.weight.float().mean().item()
    assert found["nearest"] == 1.0
    assert found["kahan"] == pytest.approx(1.01, abs=2**-8)
    assert found["stochastic"] == pytest.approx(1.01, abs=5e-4)
