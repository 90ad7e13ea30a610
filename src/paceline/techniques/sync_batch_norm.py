"""SyncBatchNorm: each batch norm takes mean and variance over the micro-batches of all ranks, not of its own alone.

Then N ranks compute what one process computes with the whole batch, up to rounding. The formula is that of
``torch.nn.SyncBatchNorm``, which could not be taken for two reasons: it refuses CPU tensors, and it counts filler. On a
GPU the passes over the data are its kernels. Ranks add up sums and a count, so that their shares may differ; filler
takes part with a count of 0, and its samples get no gradient through the statistics.

Shapes: S samples, C channels, ... positions (H and W, a length, or none).
Source: Ioffe and Szegedy, arXiv:1502.03167; over devices: Peng et al., MegDet, CVPR 2018, arXiv:1711.07240.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.contract.errors import ModelError
from paceline.machine.device import is_gpu
from paceline.seams import Batch, Build, World

SETTING = "parallel.sync_batch_norm"

_LEAVE = f"leave {SETTING} out"


@final
class OverRanks:
    """What the batch norms of a model share: how ranks add up, and which samples of the micro-batch count.

    Args:
        all_reduce: adds up a tensor over all ranks, in place, such as ``torch.distributed.all_reduce``.
    """

    def __init__(self, all_reduce: Callable[[Tensor], object]) -> None:
        self.all_reduce = all_reduce
        self.counts: Tensor | None = None
        """Bool scalar on the device: whether this rank's samples count; None: they do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OverRanks:
        return self  # a copy of the model has the same ranks

    @contextmanager
    def weighted(self, weights: Tensor) -> Iterator[None]:
        """Inside, samples of a forward pass count for nothing if all their ``weights`` [S] are 0."""
        self.counts = weights.any()
        try:
            yield
        finally:
            self.counts = None


def apply_sync_batch_norm(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> OverRanks:
    """Have the batch norms of ``model`` normalise over all ranks in training, in place.

    Names, weights and buffers stay as they are. Every rank has to run the same forward and backward passes.

    Args:
        all_reduce: adds up a tensor over all ranks, in place, such as ``torch.distributed.all_reduce``.

    Returns:
        What they share; of use to who has filler.

    Raises:
        ModelError: there is no batch norm, or one with a forward pass of its own.
    """
    shared = OverRanks(all_reduce)
    for layer in batch_norms(model):
        # on the instance, so that the class and every other model of it are left alone
        layer._over_ranks = shared  # type: ignore[assignment]
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    return shared


def apply(build: Build, world: World) -> Build:
    """Synchronised batch norms, where there are several ranks.

    Raises:
        ModelError: as ``apply_sync_batch_norm``.
    """
    if world.size == 1:
        return build
    shared, forward = apply_sync_batch_norm(build.model, world.all_reduce), build.forward

    def synchronised(model: nn.Module, batch: Batch) -> Tensor:
        with shared.weighted(batch.weights):
            return forward(model, batch)

    return replace(build, forward=synchronised).carried_out(batch_norm=f"over {world.size} ranks")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of ``model``.

    Raises:
        ModelError: there is none, or one with a forward pass of its own.
    """
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    kind = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    if not found:
        raise ModelError(f"{SETTING} = true", f"{kind} has no batch norm", _LEAVE)
    for name, layer in found.items():
        if type(layer).forward is not _BatchNorm.forward:
            why = f"{name} of {kind} is a {type(layer).__name__}, which normalises in a way of its own"
            raise ModelError(f"{SETTING} = true", why, _LEAVE)
    return list(found.values())


def refuse_torchs(model: nn.Module, num_ranks: int) -> None:
    """Refuse ``torch.nn.SyncBatchNorm`` among several ranks: it takes no CPU tensors, and counts filler as samples.

    Raises:
        ModelError: the model has one.
    """
    name = next((name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)), None)
    if name is not None and num_ranks > 1:
        raise ModelError(
            f"{name} is a torch.nn.SyncBatchNorm",
            "torch's takes no CPU tensors, and counts samples that only fill a rank's share up",
            f"leave convert_sync_batchnorm out of the model: --set {SETTING}=true does the same",
        )


def is_synchronised(layer: nn.Module) -> bool:
    """Whether it normalises over all ranks."""
    return hasattr(layer, "_over_ranks")


def _forward(self: Any, input: Tensor) -> Tensor:  # named as nn.BatchNorm2d's
    if not self.training:
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    self._check_input_dim(input)
    shared = self._over_ranks
    found, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, self.weight, self.bias, shared.counts, self.eps, shared.all_reduce
    )
    if self.track_running_stats and self.running_mean is not None:
        _follow(self, mean, variance * count / (count - 1).clamp(min=1))
    return found  # type: ignore[no-any-return]


@torch.no_grad()
def _follow(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Take statistics of a batch into the running ones, as nn.BatchNorm2d does: ``variance`` is the unbiased one."""
    layer.num_batches_tracked.add_(1)
    factor = 1 / layer.num_batches_tracked.double() if layer.momentum is None else layer.momentum
    for running, batch in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.add_((batch - running) * factor)


class _Normalise(torch.autograd.Function):
    """[S, C, ...] to the same, and mean [C], variance [C] and count of all ranks' micro-batches, in fp64."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        counts: Tensor | None,
        eps: float,
        all_reduce: Callable[[Tensor], object],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = _dense(given)
        number = given.numel() // given.shape[1]
        # mean and variance of a rank are exact to fp32, and their sums are taken in fp64: nothing cancels
        variance, mean = (each.double() for each in _var_mean(given, eps))
        sums = torch.cat([mean, variance + mean.square(), torch.ones_like(mean[:1])]) * number
        sums = _if(counts, sums)
        all_reduce(sums)
        count = sums[-1].clamp(min=1)
        mean, squares = (sums[:-1] / count).chunk(2)
        variance = (squares - mean.square()).clamp(min=0)
        kind = _summed_in(given)
        at, inverse = mean.to(kind), (variance + eps).rsqrt().to(kind)
        ctx.save_for_backward(given, weight, at, inverse, count, counts)
        ctx.all_reduce = all_reduce
        ctx.mark_non_differentiable(mean, variance, count)
        return _normalised(given, weight, bias, at, inverse, eps), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        given, weight, mean, inverse, count, counts = ctx.saved_tensors
        gradient = _like(gradient, given)
        total, products, of_weight, of_bias = _reduced(gradient, given, mean, inverse, weight)
        of_given = None
        if ctx.needs_input_grad[0]:
            both = torch.cat([total, products]).double()
            ctx.all_reduce(both)
            total, products = (each.to(mean.dtype) for each in _if(counts, both).chunk(2))
            of_given = _differentiated(gradient, given, mean, inverse, weight, total, products, count)
        wanted = ctx.needs_input_grad
        return of_given, of_weight if wanted[1] else None, of_bias if wanted[2] else None, None, None, None


def _if(counts: Tensor | None, sums: Tensor) -> Tensor:
    """The sums, or zeros where the samples do not count."""
    return sums if counts is None else torch.where(counts, sums, 0)


def _summed_in(given: Tensor) -> torch.dtype:
    return torch.float64 if given.dtype is torch.float64 else torch.float32


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...]."""
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _others(given: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, given.ndim)]


# torch's kernels for GPUs, and the same by its operators for a CPU


def _dense(given: Tensor) -> Tensor:
    """In an order that the kernels take."""
    if not is_gpu(given.device) or given.is_contiguous(memory_format=_format(given)):
        return given
    return given.contiguous()


def _like(gradient: Tensor, given: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=_format(given)) if is_gpu(given.device) else gradient


def _format(given: Tensor) -> torch.memory_format:
    last = given.ndim == 4 and given.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _var_mean(given: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Variance, not the unbiased one, and mean a channel."""
    if is_gpu(given.device):
        mean, inverse = torch.batch_norm_stats(given, eps)
        return inverse.double().pow(-2) - eps, mean
    return torch.var_mean(given.to(_summed_in(given)), _others(given), correction=0)


def _normalised(
    given: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    if is_gpu(given.device):
        return torch.batch_norm_elemt(given, weight, bias, mean, inverse, eps)
    scale = inverse if weight is None else inverse * weight
    found = (given - _channels(mean, given)) * _channels(scale, given)
    return (found if bias is None else found + _channels(bias, given)).to(given.dtype)


def _reduced(
    gradient: Tensor, given: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """[C] each: sums of the gradient, and of it times ``given - mean``; gradients of weight and bias."""
    if is_gpu(given.device):
        affine = weight is not None
        total, products, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, given, mean, inverse, weight, True, affine, affine
        )
        return total, products, of_weight, of_bias
    total = gradient.to(mean.dtype).sum(_others(given))
    products = (gradient * (given - _channels(mean, given))).sum(_others(given))
    return total, products, products * inverse, total


def _differentiated(
    gradient: Tensor,
    given: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    total: Tensor,
    products: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of what was normalised, by the sums over all ranks."""
    if is_gpu(given.device):
        number = count.to(torch.int32).reshape(1)
        return torch.batch_norm_backward_elemt(gradient, given, mean, inverse, weight, total, products, number)
    total, products = total / count, products / count * inverse.square()
    centred = given - _channels(mean, given)
    found = gradient - _channels(total, given) - centred * _channels(products, given)
    scale = inverse if weight is None else inverse * weight
    return (found * _channels(scale, given)).to(given.dtype)
