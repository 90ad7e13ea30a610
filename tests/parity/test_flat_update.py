"""Adam and SGD on flat buffers are torch's: the bits of the fused ones, up to rounding of the plain, also in skips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from paceline.kernels.adamw import adamw_
from paceline.kernels.sgd import sgd_
from paceline.optim.gradients import FlatGradients
from paceline.optim.optimizer import ParameterGroup, build_optimizer, parameter_groups
from paceline.optim.updates import DeviceGated, FlatUpdates, HostGated, Updates, build_updates
from paceline.recipe.parts import GroupPart, OptimizerPart, SchedulePart

STEPS = 20
SKIPPED = (0, 7, 8, 15)
"""Steps whose gradient is not finite; the very first is the hard one, for no state has been written then."""
CLIP = 0.05
CPU = torch.device("cpu")
NOT_CPU = torch.device("meta")
"""Asks build_updates for what a GPU gets; the tensors are on the CPU all the same."""

PART = {"lr": 0.01, "weight_decay": 0.1, "groups": (GroupPart(match="4.*", lr=0.02, weight_decay=0.0),)}


KINDS = ("adamw", "adam", "sgd", "sgd without Nesterov", "sgd without momentum")


def part_of(kind: str) -> OptimizerPart:
    of_sgd = {"sgd without Nesterov": {"nesterov": False}, "sgd without momentum": {"nesterov": False, "momentum": 0.0}}
    return OptimizerPart(type=kind.partition(" ")[0], **PART, **of_sgd.get(kind, {}))


def network(width: int = 7) -> nn.Sequential:
    """Sizes with padding between parameters, and weights with their channels last."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, width))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def groups_of(model: nn.Module, part: OptimizerPart) -> list[ParameterGroup]:
    return parameter_groups(list(model.named_parameters()), part, SchedulePart())


def rates(groups: Sequence[ParameterGroup]) -> np.ndarray:
    """[STEPS, groups], falling; in fp32, as the device keeps them."""
    falling = np.linspace(1.0, 0.1, STEPS)[:, None] * [group.lr for group in groups]
    return falling.astype(np.float32).astype(np.float64)


def gradients_of(model: nn.Module, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def drive(model: nn.Module, updates: Updates, gradients: FlatGradients, skipped: Sequence[int] = ()) -> None:
    """STEPS steps with made-up gradients, through the arithmetic of the engine's step."""
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, step), strict=True):
            parameter.grad.copy_(gradient)
        if step in skipped:
            next(model.parameters()).grad[0, 0, 0, 0] = float("inf")
        norm = gradients.norm()
        updates.apply(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0), norm.isfinite())


def flat(model: nn.Module, kind: str) -> tuple[Updates, FlatGradients]:
    part = part_of(kind)
    groups = groups_of(model, part)
    updates, gradients = build_updates(groups, part, rates(groups), NOT_CPU)
    assert isinstance(updates, FlatUpdates)
    assert isinstance(gradients, FlatGradients)
    return updates, gradients


def torchs(model: nn.Module, kind: str, *, fused: bool) -> tuple[Updates, FlatGradients]:
    part = part_of(kind)
    groups = groups_of(model, part)
    optimizer = build_optimizer(groups, part, fused=fused)
    updates = DeviceGated(optimizer, rates(groups), CPU) if fused else HostGated(optimizer, rates(groups))
    return updates, FlatGradients(updates.parameters)


def different(one: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [(), SKIPPED], ids=["all", "some skipped"])
def test_it_has_the_bits_of_torchs_fused_optimizer(kind: str, skipped: Sequence[int]) -> None:
    # whole vector registers: the last few elements of a tensor go through code that rounds otherwise
    ours, theirs = network(16), network(16)
    flat_updates, flat_gradients = flat(ours, kind)
    torch_updates, torch_gradients = torchs(theirs, kind, fused=True)
    drive(ours, flat_updates, flat_gradients, skipped)
    drive(theirs, torch_updates, torch_gradients, skipped)
    assert different(ours, theirs) == []
    assert different(ours, network(16)), "nothing was trained"
    assert flat_updates.applied == torch_updates.applied == STEPS - len(skipped)
    found = flat_updates.tensors({p: n for n, p in ours.named_parameters()})
    expected = torch_updates.tensors({p: n for n, p in theirs.named_parameters()})
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [(), SKIPPED], ids=["all", "some skipped"])
def test_it_is_torchs_plain_optimizer_up_to_rounding(kind: str, skipped: Sequence[int]) -> None:
    ours, theirs = network(), network()
    drive(ours, *flat(ours, kind), skipped)
    drive(theirs, *torchs(theirs, kind, fused=False), skipped)
    for (name, tensor), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_it_is_a_loop_written_by_hand() -> None:
    """clip_grad_norm_, torch.optim.AdamW and a learning rate set each step."""
    ours, theirs = network(), network()
    updates, gradients = flat(ours, "adamw")
    drive(ours, updates, gradients)
    groups = groups_of(theirs, OptimizerPart(**PART))
    optimizer = torch.optim.AdamW([{"params": g.parameters, "weight_decay": g.weight_decay} for g in groups])
    for step, row in enumerate(rates(groups)):
        for parameter, gradient in zip(theirs.parameters(), gradients_of(theirs, step), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        for group, rate in zip(optimizer.param_groups, row, strict=True):
            group["lr"] = rate
        optimizer.step()
    for (name, tensor), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_step_leaves_no_trace(kind: str) -> None:
    model = network()
    updates, gradients = flat(model, kind)
    next(model.parameters()).grad.fill_(float("nan"))
    norm = gradients.norm()
    updates.apply(gradients, CLIP / norm, norm.isfinite())
    assert different(model, network()) == []
    assert updates.applied == 0
    states = updates.tensors({p: n for n, p in model.named_parameters()})
    assert [name for name, tensor in states.items() if tensor.any()] == []


def test_padding_stays_zero() -> None:
    model = network()
    updates, gradients = flat(model, "adamw")
    drive(model, updates, gradients, SKIPPED)
    memory = torch.empty(0).set_(next(model.parameters()).untyped_storage())
    assert memory.numel() > sum(p.numel() for p in model.parameters()), "no padding to look at"
    assert memory.count_nonzero() == sum(int(p.count_nonzero()) for p in model.parameters())


def test_weights_that_stand_apart_are_updated_where_they_are() -> None:
    memory = torch.ones(12)
    ours = nn.ParameterList([memory[:6], torch.ones(5), memory[6:]])
    theirs = nn.ParameterList([torch.ones(6), torch.ones(5), torch.ones(6)])
    part = OptimizerPart(lr=0.1, decay_all=True)
    for model in (ours, theirs):
        groups = groups_of(model, part)
        updates, gradients = build_updates(groups, part, np.full((3, 1), 0.1), NOT_CPU)
        for step in range(3):
            loss = sum(((i + step + 1) * p).sum() for i, p in enumerate(model))
            gradients.add(loss, first=True, last=True)
            updates.apply(gradients, torch.ones(()), torch.tensor(True))
    assert different(ours, theirs) == []
    assert torch.equal(memory, torch.cat([theirs[0], theirs[2]]))


def test_the_operators_are_well_made() -> None:
    """Schema, fake implementation and tracing agree with what they do."""

    def lists(number: int) -> list[list[torch.Tensor]]:
        return [[torch.rand(8), torch.rand(2, 3)] for _ in range(number)]

    scalars = [torch.tensor(value) for value in (1.0, 0.1, 2.0, 0.0)]
    torch.library.opcheck(adamw_, (*lists(4), *scalars, 0.9, 0.999, 1e-8, 0.1, True))
    torch.library.opcheck(sgd_, (*lists(3), *scalars[1:], 0.9, 0.1, True))
    torch.library.opcheck(sgd_, (*lists(2), [], *scalars[1:], 0.0, 0.1, False))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_can_be_traced_without_a_device(kind: str) -> None:
    """What planning rests on: a tensor learning rate is never asked for its value."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(4, 3)
        part = part_of(kind).model_copy(update={"groups": ()})
        groups = groups_of(model, part)
        updates, gradients = build_updates(groups, part, np.full((3, 2), 0.1), NOT_CPU)
        gradients.add(model(torch.ones(2, 4)).sum(), first=True, last=True)
        norm = gradients.norm()
        updates.apply(gradients, torch.ones_like(norm), norm.isfinite())
        with pytest.raises(RuntimeError):
            _ = updates.applied  # nothing has a value here
