"""torch's own attention kernels as operators over packed rows: FlashAttention, and the memory-efficient one.

Each says beforehand what shapes it returns, so that a compiler and a plan see through it, and keeps the random state
of its dropout for the backward pass.

Shapes: T positions of the row, H heads, D head size, P sequences, L length of the longest.
Source: Dao, FlashAttention-2, arXiv 2307.08691, and Rabe and Staats, arXiv 2112.05682, as they come with torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]

# -- FlashAttention ----------------------------------------------------------------------------------------------------
#
# torch.nn.attention.varlen wraps the same kernel, without its dropout.


@torch.library.custom_op("paceline::flash_varlen", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [T, H, D], logarithms of the softmax's sums [H, T], and the random state of the dropout: [2] and []."""
    return _run_flash(q, k, v, cu_seqlens, max_length, dropout, scale, window)


@flash.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_flash(q)


def _empty_flash(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty(q.shape), sums, q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


@torch.library.custom_op("paceline::flash_varlen_backward", mutates_args=())
def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    unused: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = (out, sums, state, unused, cu_seqlens, max_length, dropout, scale, window)
    dq, dk, dv = _run_flash_backward(grad, q, k, v, *kept)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_flash_backward.register_fake
def _(grad: Tensor, q: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate_flash(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return (*_flash_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), *(None,) * 5)


flash.register_autograd(_differentiate_flash, setup_context=_keep)


@torch.library.custom_op("paceline::flash_varlen_joined", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def flash_joined(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``flash`` of [T, 3, H, D]."""
    q, k, v = qkv.unbind(1)
    return _run_flash(q, k, v, cu_seqlens, max_length, dropout, scale, window)


@flash_joined.register_fake
def _(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_flash(qkv[:, 0])


@torch.library.custom_op("paceline::flash_varlen_joined_backward", mutates_args=())
def _flash_joined_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    unused: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
    window: int,
) -> Tensor:
    """Gradient of qkv, [T, 3, H, D]. Stacked in here, out of a compiler's sight, by a copy at the speed of memory."""
    q, k, v = qkv.unbind(1)
    kept = (out, sums, state, unused, cu_seqlens, max_length, dropout, scale, window)
    return torch.stack(_run_flash_backward(grad, q, k, v, *kept), dim=1)


@_flash_joined_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep_flash_joined(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate_flash_joined(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return (_flash_joined_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), *(None,) * 5)


flash_joined.register_autograd(_differentiate_flash_joined, setup_context=_keep_flash_joined)


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    max_length = min(max_length, q.shape[0])  # the kernel refuses to hear of longer sequences than the row
    out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        dropout,
        False,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=window,
    )
    return out.contiguous(), sums, state, unused


def _run_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    unused: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
    window: int,
) -> Gradients:
    max_length = min(max_length, q.shape[0])
    found: Gradients = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        sums,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        dropout,
        False,
        state,
        unused,
        scale=scale,
        window_size_left=window,
        window_size_right=window,
    )
    return found


# -- memory-efficient attention ----------------------------------------------------------------------------------------


def _rounded(length: int) -> int:
    """Sums are kept for a multiple of 32 queries."""
    return -(-length // 32) * 32


@torch.library.custom_op("paceline::efficient_varlen", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def efficient(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [T, H, D], logarithms of the softmax's sums [P, H, L rounded up to 32], and the dropout's seed, offset."""
    longest = min(max_length, q.shape[0])  # the kernels refuse to hear of longer sequences than the row
    out, sums, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
        q[None],
        k[None],
        v[None],
        None,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        0,
        True,
        scale=scale,
    )
    # as wide as for the longest sequence there may be, so that the shape is known beforehand
    sums = F.pad(sums, (0, _rounded(max_length) - sums.shape[2]))
    return out[0].contiguous(), sums, seed, offset


@efficient.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = q.new_empty((cu_seqlens.shape[0] - 1, q.shape[1], _rounded(max_length)), dtype=torch.float32)
    return q.new_empty(q.shape), sums, q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


@torch.library.custom_op("paceline::efficient_varlen_backward", mutates_args=())
def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    longest = min(max_length, q.shape[0])
    found = torch.ops.aten._efficient_attention_backward(
        grad[None],
        q[None],
        k[None],
        v[None],
        None,
        out[None],
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        sums[:, :, : _rounded(longest)].contiguous(),
        dropout,
        seed,
        offset,
        0,
        False,
        scale=scale,
    )
    return found[0][0].contiguous(), found[1][0].contiguous(), found[2][0].contiguous()


@_efficient_backward.register_fake
def _(grad: Tensor, q: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _differentiate_efficient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return (*_efficient_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), *(None,) * 4)


efficient.register_autograd(_differentiate_efficient, setup_context=_keep)
