"""Attention of packed sequences on the CPU, one after the other: no position is computed that no sample has.

Two operators. Without dropout each sequence goes through torch's fused CPU kernel. That kernel has no dropout, and
what torch falls back to draws its mask one Bernoulli number at a time, which takes longer than all the arithmetic; so
with dropout the few matrix products are written out here, and 16 random bits decide about each probability.

Shapes: T positions, H heads, D head size, P sequences, N positions of one sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LEVELS = 1 << 16
"""Dropout is rounded to a multiple of 1 / LEVELS; kept probabilities are scaled by what it was rounded to."""

Gradients = tuple[Tensor, Tensor, Tensor]


def sequence_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> Tensor:
    """Attention within each sequence, on the CPU.

    Args:
        q, k, v: [T, H, D] in any floating-point format; the last dimension contiguous.
        cu_seqlens: int32 [P + 1].
        max_length: no sequence is longer.
        dropout: share of the attention probabilities that is dropped.
        scale: of the products of queries and keys.
        window: a position sees those at most this far away; -1: all of its sequence.

    Returns:
        [T, H, D]; zero where no sequence is.
    """
    if dropout == 0:
        return _fused(q, k, v, cu_seqlens, scale, window)[0]  # type: ignore[no-any-return]
    if q.dtype.itemsize < 4:  # probabilities are sums of many small numbers
        wide = sequence_attention(q.float(), k.float(), v.float(), cu_seqlens, max_length, dropout, scale, window)
        return wide.to(q.dtype)
    return _dropped(q, k, v, cu_seqlens, max_length, dropout, scale, window)[0]  # type: ignore[no-any-return]


def _spans(cu_seqlens: Tensor) -> Iterator[slice]:
    """Where the sequences are that have any position."""
    return (slice(first, end) for first, end in itertools.pairwise(cu_seqlens.tolist()) if end > first)


def _heads_first(tensors: tuple[Tensor, ...], span: slice) -> list[Tensor]:
    """Views [H, N, D] of one sequence."""
    return [tensor[span].transpose(0, 1) for tensor in tensors]


def _far(q: Tensor, cu_seqlens: Tensor, window: int) -> Tensor | None:
    """[N, N] of the longest sequence: minus infinity where two positions do not see each other, else 0."""
    if window < 0:
        return None
    at = torch.arange(int(cu_seqlens.diff().max()))
    far = torch.zeros(len(at), len(at), dtype=q.dtype)
    return far.masked_fill_((at[:, None] - at).abs() > window, -torch.inf)


# -- without dropout ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("paceline::sequences", mutates_args=(), device_types="cpu")
def _fused(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the logarithms of the softmax's sums [T, H]."""
    out, sums = _empty_fused(q, k, v, cu_seqlens, scale, window)
    far = _far(q, cu_seqlens, window)
    for span in _spans(cu_seqlens):
        length = span.stop - span.start
        mask = None if far is None else far[:length, :length]
        heads = (part[None] for part in _heads_first((q, k, v), span))
        found, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, attn_mask=mask, scale=scale)
        out[span], sums[span] = found[0].transpose(0, 1), logs[0].T
    out[int(cu_seqlens[-1]) :] = 0
    return out, sums


@_fused.register_fake
def _empty_fused(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=exact)


@torch.library.custom_op("paceline::sequences_backward", mutates_args=(), device_types="cpu")
def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    far = _far(q, cu_seqlens, window)
    for span in _spans(cu_seqlens):
        length = span.stop - span.start
        mask = None if far is None else far[:length, :length]
        heads = (part[None] for part in _heads_first((grad, q, k, v, out), span))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, sums[span].T[None], 0.0, False, attn_mask=mask, scale=scale
        )
        for target, part in zip(grads, found, strict=True):
            target[span] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


@_fused_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
) -> Gradients:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _keep_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate_fused(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return (*_fused_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None)


_fused.register_autograd(_differentiate_fused, setup_context=_keep_fused)


# -- with dropout ------------------------------------------------------------------------------------------------------
#
# One sequence's probabilities W = softmax(scale Q K') are kept for the backward pass, with a minus sign on those that
# are dropped: |W| is the softmax and max(W, 0) / keep what multiplies V.


def _threshold(dropout: float) -> tuple[int, float]:
    """How many of the LEVELS are dropped, and what the others are multiplied by."""
    dropped = round(dropout * LEVELS)
    return dropped, LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


@torch.library.custom_op(
    "paceline::sequences_dropout", mutates_args=(), device_types="cpu", tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropped(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the signed probabilities, sequence after sequence, each [H, N, N]."""
    out, signed = _empty_dropped(q, k, v, cu_seqlens, max_length, dropout, scale, window)
    heads, longest = q.shape[1], int(cu_seqlens.diff().max())
    (dropped, factor), far = _threshold(dropout), _far(q, cu_seqlens, window)
    bits = torch.empty(-(-heads * longest**2 // 4), dtype=torch.int64)
    scratch = q.new_empty(heads * longest**2)
    begin = 0
    for span in _spans(cu_seqlens):
        length = span.stop - span.start
        shape, count = (heads, length, length), heads * length**2
        weights, kept = signed[begin : begin + count].view(shape), scratch[:count].view(shape)
        begin += count
        queries, keys, values, target = _heads_first((q, k, v, out), span)
        torch.baddbmm(weights, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=weights)
        if far is not None:
            weights += far[:length, :length]
        torch.softmax(weights, -1, out=weights)
        drawn = bits[: -(-count // 4)].random_(-(2**63), None).view(torch.int16)[:count].view(shape)
        # negative for the lowest levels; never zero
        kept.copy_(drawn).add_(LEVELS // 2 - dropped + 0.5)
        torch.copysign(weights, kept, out=weights)
        torch.clamp(weights, min=0, out=kept)
        torch.baddbmm(target, kept, values, beta=0, alpha=factor, out=target)
    out[int(cu_seqlens[-1]) :] = 0
    return out, signed


@_dropped.register_fake
def _empty_dropped(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    # as large as T positions can need; the system hands out memory only for what is written
    return q.new_empty(q.shape), q.new_empty(q.shape[0] * q.shape[1] * max_length)


@torch.library.custom_op("paceline::sequences_dropout_backward", mutates_args=(), device_types="cpu")
def _dropped_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    signed: Tensor,
    cu_seqlens: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(q, memory_format=torch.contiguous_format) for _ in range(3))
    heads, longest = q.shape[1], int(cu_seqlens.diff().max())
    factor = _threshold(dropout)[1]
    scratch = q.new_empty(2, heads * longest**2)
    # the softmax's backward pass needs sum_j P_ij dP_ij, which is the sum over the head of dO * O
    inner = (grad * out).sum(-1)
    begin = 0
    for span in _spans(cu_seqlens):
        length = span.stop - span.start
        shape, count = (heads, length, length), heads * length**2
        weights = signed[begin : begin + count].view(shape)
        kept, slope = scratch[0, :count].view(shape), scratch[1, :count].view(shape)
        begin += count
        rows, queries, keys, values = _heads_first((grad, q, k, v), span)
        to_queries, to_keys, to_values = _heads_first(grads, span)
        torch.clamp(weights, min=0, out=kept)
        torch.baddbmm(to_values, kept.transpose(1, 2), rows, beta=0, alpha=factor, out=to_values)
        torch.baddbmm(slope, rows, values.transpose(1, 2), beta=0, alpha=factor, out=slope)
        slope.mul_(kept)
        torch.abs(weights, out=kept)
        slope.sub_(kept.mul_(inner[span].T[:, :, None]))
        torch.baddbmm(to_queries, slope, keys, beta=0, alpha=scale, out=to_queries)
        torch.baddbmm(to_keys, slope.transpose(1, 2), queries, beta=0, alpha=scale, out=to_keys)
    return grads[0], grads[1], grads[2]


@_dropped_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    signed: Tensor,
    cu_seqlens: Tensor,
    dropout: float,
    scale: float,
) -> Gradients:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _keep_dropped(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, _, ctx.dropout, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate_dropped(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    found = _dropped_backward(grad.contiguous(), *ctx.saved_tensors, ctx.dropout, ctx.scale)
    return (*found, None, None, None, None, None)


_dropped.register_autograd(_differentiate_dropped, setup_context=_keep_dropped)
