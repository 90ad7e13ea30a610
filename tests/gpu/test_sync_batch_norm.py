"""Synchronised batch norms beside torch's, by two processes that share a GPU, and their kernels beside a plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.techniques.sync_batch_norm import apply_sync_batch_norm
from tests.testing.distributed import run_processes


def passed(layer: nn.Module, given: Tensor, gradient: Tensor) -> list[Tensor]:
    leaf = given.clone().requires_grad_()
    found = layer(leaf)
    found.backward(gradient)
    parameters = [parameter.grad for parameter in layer.parameters()]
    return [found.detach(), leaf.grad, *parameters, layer.running_mean.clone(), layer.running_var.clone()]


def drawn(samples: int, kind: torch.dtype, memory: torch.memory_format) -> tuple[Tensor, Tensor]:
    given, gradient = (torch.randn(samples, 16, 9, 7, device="cuda") for _ in range(2))
    return tuple(tensor.to(kind).contiguous(memory_format=memory) for tensor in (given * 3 + 1, gradient))


def beside_torchs(rank: int, meeting: str, kind: torch.dtype) -> list[tuple[float, float]]:
    """The furthest of ours and of torch's from one another, and the size, of each result; shares are unequal."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.manual_seed(rank)
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        given, gradient = drawn((3, 5)[rank], kind, memory)
        ours, theirs = nn.BatchNorm2d(16).cuda(), nn.SyncBatchNorm(16).cuda()
        apply_sync_batch_norm(ours, dist.all_reduce)
        for own, other in zip(passed(ours, given, gradient), passed(theirs, given, gradient), strict=True):
            assert own.dtype == other.dtype
            found.append((float((own - other).abs().max()), float(other.abs().max())))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_two_processes_get_what_torchs_layer_gives_them(kind: torch.dtype, tmp_path: Path) -> None:
    close = 1e-5 if kind is torch.float32 else 1e-2
    for found in run_processes(beside_torchs, 2, f"file://{tmp_path}/meeting", kind, timeout_seconds=120):
        assert all(far <= close * size for far, size in found), found


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_alone_it_is_a_plain_batch_norm(memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    given, gradient = drawn(4, torch.float32, memory)
    ours, plain = nn.BatchNorm2d(16).cuda(), nn.BatchNorm2d(16).cuda()
    apply_sync_batch_norm(ours, lambda sums: sums)
    for own, other in zip(passed(ours, given, gradient), passed(plain, given, gradient), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_filler_counts_for_nothing_and_gets_no_gradient() -> None:
    given, gradient = drawn(4, torch.float32, torch.contiguous_format)
    layer = nn.BatchNorm2d(16).cuda()
    others = torch.randn(4, 16, 9, 7, device="cuda")
    mean, square, number = others.mean((0, 2, 3)).double(), others.square().mean((0, 2, 3)).double(), 4 * 63

    def with_another_rank(sums: Tensor) -> None:
        if len(sums) == 33:
            assert not sums.any(), "filler was counted"
            sums += torch.cat([mean, square, mean.new_ones(1)]) * number
        else:
            sums += 5.0

    shared = apply_sync_batch_norm(layer, with_another_rank)
    leaf = given.clone().requires_grad_()
    with shared.weighted(torch.zeros(4, device="cuda")):
        found = layer(leaf)
    found.backward(torch.zeros_like(gradient))
    assert not leaf.grad.any()
    torch.testing.assert_close(layer.running_mean, 0.1 * mean.float(), rtol=1e-4, atol=1e-5)
