"""What a model keeps of the batches it saw, such as the running statistics of batch normalisation, on several ranks.

Each rank normalises by, and keeps, the statistics of its own share of the batch. Before every evaluation and checkpoint
the ranks take their mean. Statistics that are kept are linear in those of the batches, so that the mean at the end of a
run is the same up to rounding however often it was taken in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.seams import World


@torch.no_grad()
def settle_(buffers: Sequence[Tensor], world: World) -> None:
    """Give every rank the mean of all ranks' buffers, in place; of those that hold no fractions, rank 0's.

    All ranks then hold the same bits. What was equal before keeps its bits: constants do not drift.
    """
    if world.size == 1 or not buffers:
        return
    own = [buffer.clone() for buffer in buffers]
    world.broadcast_(buffers)
    pairs = [(first, mine) for first, mine in zip(buffers, own, strict=True) if first.is_floating_point()]
    if not pairs:
        return
    # the mean as distances from rank 0's: a sum of equal numbers would be rounded, of infinities no number at all
    distances = [torch.where(mine == first, 0, mine.double() - first.double()).reshape(-1) for first, mine in pairs]
    total = world.sum_(torch.cat(distances)) / world.size
    for (first, _), distance in zip(pairs, total.split([len(d) for d in distances]), strict=True):
        first.copy_(first.double() + distance.view(first.shape))


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that normalisation layers write in training."""
    layers = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


@contextmanager
def kept_from_filler(statistics: Sequence[Tensor], weights: Tensor) -> Iterator[None]:
    """Put ``statistics`` back as they were before the forward pass inside, if all its samples were filler.

    The device decides, by ``weights`` [S], so that nothing waits: a few launches however many layers there are.
    """
    kinds = dict.fromkeys(tensor.dtype for tensor in statistics)
    same = [[tensor for tensor in statistics if tensor.dtype == kind] for kind in kinds]
    before = [_joined(tensors) for tensors in same]
    yield
    is_real = weights.any()
    with torch.no_grad():
        for tensors, kept in zip(same, before, strict=True):
            chosen = torch.where(is_real, _joined(tensors), kept).split([tensor.numel() for tensor in tensors])
            # .data: backward has saved them, reads none in training, and must not take this for a change
            torch._foreach_copy_(
                [tensor.data for tensor in tensors],
                [part.view(tensor.shape) for part, tensor in zip(chosen, tensors, strict=True)],
            )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """1-d copy of all of them."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
