"""``parallel.strategy: dp`` on GPUs that are not there: what the first of them holds, which holds the most.

torch's DataParallel moves weights and gradients by kernels of CUDA alone. What it does on the first GPU is done here
in its place, so that the ledger sees the same: at every pass a piece of the batch, weights handed out from buffers of
10 MiB, logits gathered; behind the backward pass all gradients of the first GPU's copy, and a second set of them,
summed over the GPUs, before they are added to the run's own.

Source: torch/nn/parallel/data_parallel.py, replicate.py, _functions.py and comm.py, with NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.func import functional_call
from torch.utils.backend_registration import _DummyBackendModule

BUFFER_BYTES = 10 * 2**20
"""``buffer_size`` of torch.nn.parallel.comm: smaller tensors travel together in buffers of this size."""


@contextlib.contextmanager
def split_over(num_gpus: int) -> Iterator[None]:
    """Inside, a process sees so many stand-ins for a GPU, and torch's DataParallel keeps to the first of them."""
    counted = patch.object(_DummyBackendModule, "device_count", lambda module: num_gpus)
    with counted, patch.object(nn, "DataParallel", FirstGpu):
        yield


@final
class FirstGpu(nn.Module):
    """In place of ``nn.DataParallel``: its passes as the first GPU sees them. The other pieces are computed nowhere,
    and their logits say nothing.

    Args:
        module: on the first GPU.
        device_ids: all GPUs.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        super().__init__()
        self.module, self.num_gpus = module, len(device_ids)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = [*inputs, *named.values()]
        pieces = [tensor.chunk(self.num_gpus)[0] for tensor in given]
        names, weights = zip(*self.module.named_parameters(), strict=True)
        copies: Iterable[Tensor] = weights
        if torch.is_grad_enabled():
            copies = _HandedOut.apply(*weights)  # type: ignore[no-untyped-call]
        else:
            _hand_out(weights)
        _hand_out(list(self.module.buffers()))
        own, by_name = tuple(pieces[: len(inputs)]), dict(zip(named, pieces[len(inputs) :], strict=True))
        output = functional_call(self.module, dict(zip(names, copies, strict=True)), own, by_name)
        logits: Tensor = getattr(output, "logits", output)
        others = logits.new_empty(len(given[0]) - len(logits), *logits.shape[1:])
        return torch.cat([logits, others])


@final
class _HandedOut(torch.autograd.Function):
    """``Broadcast``: the first GPU's copies are the weights themselves. As there, weights that are not trained have
    gradients of zeros, which are summed too."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        _hand_out(weights)
        still = [weight for weight, wanted in zip(weights, ctx.needs_input_grad, strict=True) if not wanted]
        ctx.mark_non_differentiable(*still)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        summed: list[Tensor] = []
        for chunk in _take_tensors(gradients, BUFFER_BYTES):
            flat = _flatten_dense_tensors(chunk)
            total = torch.empty_like(flat)
            summed += [tensor.data for tensor in _unflatten_dense_tensors(total, chunk)]
        return tuple(summed)


def _hand_out(tensors: Sequence[Tensor]) -> None:
    """``broadcast_coalesced``: what is sent lies in a buffer for a moment, but for tensors that fill one alone."""
    for chunk in _take_tensors(tensors, BUFFER_BYTES):
        _flatten_dense_tensors(chunk)
