"""What a model keeps of the batches it saw, such as the running statistics of batch normalisation, on several ranks.

Each rank normalises by, and keeps, the statistics of its own share of the batch. Before every evaluation and checkpoint
the ranks take their mean. Statistics that are kept are linear in those of the batches, so that the mean at the end of a
run is the same up to rounding however often it was taken in between.

A layer that has one value a channel of each sample has no spread to divide by where a sample is alone in its
micro-batch: torch refuses to train there. So ranks get two samples or none of an epoch's last batch
(``ShuffledOrder``'s ``fewest``), and what leaves a sample alone all the same is refused before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.contract.errors import RecipeError
from paceline.data.order import ShuffledOrder, micro_batch_size_above
from paceline.engine.evaluate import inference
from paceline.recipe.parts import LoopPart
from paceline.seams import Build, Ids, World
from paceline.techniques.sync_batch_norm import is_synchronised


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
    total = world.all_reduce(torch.cat(distances)) / world.size
    for (first, _), distance in zip(pairs, total.split([len(d) for d in distances]), strict=True):
        first.copy_(first.double() + distance.view(first.shape))


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that normalisation layers write in training, each rank by itself."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and module.track_running_stats and not is_synchronised(module)
    ]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def fewest_together(model: nn.Module) -> int:
    """Samples that a rank is to get of a step, where it gets any: for ``ShuffledOrder``."""
    return 2 if any(isinstance(m, _BatchNorm) and not is_synchronised(m) for m in model.modules()) else 1


def check_smallest(
    build: Build, order: ShuffledOrder, part: LoopPart, ids: Ids, *, total_steps: int, world_size: int
) -> None:
    """Refuse steps with a micro-batch of one sample that the model cannot be trained on.

    Args:
        build: whose model is run on two samples, in evaluation mode, where it comes to that; on all ranks alike.
        order: that splits ``ids``, the training split.
        part: the recipe's ``loop``.
        total_steps: of the run: it may end before an epoch's last batch.

    Raises:
        RecipeError: names the layer, and settings that work.
    """
    batch_size, samples = part.batch_size, len(ids)
    # what ranks normalise together is theirs together
    meets = world_size > 1 and any(map(is_synchronised, build.model.modules()))
    smallest = order.smallest_together if meets else order.smallest
    rest = samples % batch_size if min(total_steps, order.steps_per_epoch(batch_size)) * batch_size > samples else 0
    is_whole = smallest(min(batch_size, samples), world_size, batch_size) == 1
    if not is_whole and not (rest and smallest(rest, world_size, batch_size) == 1):
        return
    layer = _needs_two(build, ids)
    if not layer:
        return
    asked = f"loop.batch_size = {batch_size}"
    micro = part.micro_batch_size or batch_size
    asked += f", loop.micro_batch_size = {micro}" if micro < batch_size else ""
    alone = f"batch normalisation ({layer}) cannot train on a sample by itself: it has one value a channel"
    last = f"the last batch of an epoch has {rest} of {samples:,} training samples, and one is left alone; "
    raise RecipeError(
        f"{asked}: {world_size} processes" if world_size > 1 else asked,
        alone if is_whole else last + alone,
        _larger(part, ids, world_size) if is_whole else "--set loop.drop_last=true",
    )


def _larger(part: LoopPart, ids: Ids, world_size: int) -> str:
    """The smallest change of the recipe that leaves no sample of a whole batch alone."""
    if len(ids) < 2:
        return "give more data"
    if part.batch_size < 2 * world_size:
        fewer = part.batch_size // 2
        or_start = f" or more, or start {fewer} process{'es or fewer' if fewer > 1 else ''}" if fewer else ""
        return f"--set loop.batch_size={2 * world_size}{or_start}"
    most = min(part.batch_size, len(ids))
    micro = micro_batch_size_above(part.micro_batch_size or 1, most, world_size, part.batch_size, fewest=2)
    return f"--set loop.micro_batch_size={micro}"


def _needs_two(build: Build, ids: Ids) -> str:
    """Name of a batch normalisation that has one value a channel of each sample; empty where none has."""
    layers = {name: module for name, module in build.model.named_modules() if isinstance(module, _BatchNorm)}
    if not layers:
        return ""
    found, training = [], build.model.training
    two = build.layout.collate(np.resize(ids, 2))
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: found.append(name) if given[0].numel() == 2 * given[0].shape[1] else None
        )
        for name, layer in layers.items()
    ]
    try:
        inference(build)(two)
    finally:
        for hook in hooks:
            hook.remove()
        build.model.train(training)
    return found[0] if found else ""


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
