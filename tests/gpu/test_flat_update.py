"""The flat update on a GPU: torch's fused optimizer, eager and captured, without a wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from paceline.kernels.adamw import LARGE
from paceline.optim.gradients import FlatGradients
from paceline.optim.optimizer import build_optimizer
from paceline.optim.updates import DeviceGated, FlatUpdates, Updates, build_updates
from tests.gpu.test_step import waits_are_errors
from tests.parity import test_flat_update as cpu
from tests.unit.kernels.test_adamw import follow_the_formula
from tests.unit.kernels.test_sgd import follow_torchs_sgd

CUDA = torch.device("cuda")

Made = tuple[nn.Module, Updates, FlatGradients]


def flat(kind: str, width: int = 7) -> Made:
    model = cpu.network(width).to(CUDA)
    part = cpu.part_of(kind)
    groups = cpu.groups_of(model, part)
    updates, gradients = build_updates(groups, part, cpu.rates(groups), CUDA)
    assert isinstance(updates, FlatUpdates)
    return model, updates, gradients


def torchs(kind: str, width: int = 7) -> Made:
    model = cpu.network(width).to(CUDA)
    part = cpu.part_of(kind)
    groups = cpu.groups_of(model, part)
    updates = DeviceGated(build_optimizer(groups, part, fused=True), cpu.rates(groups), CUDA)
    return model, updates, FlatGradients(updates.parameters)


def apply(updates: Updates, gradients: FlatGradients) -> None:
    norm = gradients.norm()
    updates.apply(gradients, (cpu.CLIP / (norm + 1e-6)).clamp(max=1.0), norm.isfinite())


def put(model: nn.Module, found: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad.copy_(gradient, non_blocking=True)


def all_gradients(model: nn.Module, skipped: Sequence[int]) -> list[list[torch.Tensor]]:
    found = [[g.to(CUDA) for g in cpu.gradients_of(model, step)] for step in range(cpu.STEPS)]
    for step in skipped:
        found[step][0][0, 0, 0, 0] = float("nan")
    return found


def captured(updates: Updates, gradients: FlatGradients) -> Callable[[], None]:
    """Applies an update by replaying it; capture applies none."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        apply(updates, gradients)
    return graph.replay


@pytest.mark.parametrize("kind", cpu.KINDS)
@pytest.mark.parametrize("skipped", [(), cpu.SKIPPED], ids=["all", "some skipped"])
def test_it_has_the_bits_of_torchs_fused_optimizer(kind: str, skipped: Sequence[int]) -> None:
    # whole vectors: torch's SGD takes other tensors one element at a time, in code that rounds otherwise
    (ours, *flat_parts), (theirs, *torch_parts) = flat(kind, 16), torchs(kind, 16)
    for found in all_gradients(ours, skipped):
        for model, parts in ((ours, flat_parts), (theirs, torch_parts)):
            put(model, found)
            apply(*parts)
    assert cpu.different(ours, theirs) == []
    assert cpu.different(ours, cpu.network(16).to(CUDA)), "nothing was trained"
    assert flat_parts[0].applied == torch_parts[0].applied == cpu.STEPS - len(skipped)
    found = flat_parts[0].tensors({p: n for n, p in ours.named_parameters()})
    expected = torch_parts[0].tensors({p: n for n, p in theirs.named_parameters()})
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("kind", "make"), [*((kind, flat) for kind in cpu.KINDS), ("adamw", torchs), ("sgd", torchs)])
def test_a_captured_update_has_the_bits_of_an_eager_one(kind: str, make: Callable[[str], Made]) -> None:
    (eager, *parts), (replayed, *other_parts) = make(kind), make(kind)
    assert other_parts[0].capturable is None
    everything = all_gradients(eager, cpu.SKIPPED)
    for found in everything[:2]:  # the first is skipped, the second allocates what is allocated late
        for model, each in ((eager, parts), (replayed, other_parts)):
            put(model, found)
            apply(*each)
    replay = captured(*other_parts)
    with waits_are_errors():
        for found in everything[2:]:
            put(eager, found)
            apply(*parts)
            put(replayed, found)
            replay()
    assert cpu.different(eager, replayed) == []
    assert parts[0].applied == other_parts[0].applied == cpu.STEPS - len(cpu.SKIPPED)


def test_the_norm_of_the_buffer_is_the_norm_of_the_gradients() -> None:
    model, _, gradients = flat("adamw")
    for found in all_gradients(model, ())[:5]:
        put(model, found)
        torch.testing.assert_close(gradients.norm(), torch.nn.utils.get_total_norm(found), rtol=1e-6, atol=0)


def test_gradients_are_written_and_added_without_a_wait() -> None:
    model, _, gradients = flat("adamw")
    images = torch.randn(3, 4, 3, 8, 8, device=CUDA)
    gradients.add(model(images[2]).square().sum(), first=True, last=True)  # loads kernels, which may wait
    with waits_are_errors():
        for index in range(3):
            gradients.add(model(images[index]).square().sum(), first=index == 0, last=index == 2)
        gradients.check()
    plain = cpu.network().to(CUDA)
    for part in images:
        plain(part).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")


def test_an_ordinary_model_leaves_nothing_apart_and_its_weights_are_aligned() -> None:
    model, updates, _ = flat("adamw")
    assert isinstance(updates, FlatUpdates)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert all(p.data_ptr() % 256 == 0 for p in model.parameters())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("count", [LARGE, 3 * LARGE + 17])
def test_the_kernel_of_adam_for_large_buffers_follows_the_formula(count: int, decoupled: bool) -> None:
    follow_the_formula(count, decoupled, "cuda")


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
@pytest.mark.parametrize("count", [LARGE, 3 * LARGE + 17])
def test_the_kernel_of_sgd_for_large_buffers_follows_torchs(count: int, momentum: float, nesterov: bool) -> None:
    follow_torchs_sgd(count, momentum, nesterov, "cuda")
