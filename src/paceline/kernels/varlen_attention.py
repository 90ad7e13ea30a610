"""Attention of packed sequences: each position sees its own sequence and nothing else, dropout included.

The operator is chosen by what the host knows: device, number format, shapes. Where the sequences are is data on the
device, so nothing here waits for it, and all of it may be captured in a graph, but for the loop of the CPU.

Shapes: T positions of the row, H heads, D head size, P sequences, L length of the longest.
Source: Dao, FlashAttention-2, arXiv 2307.08691, and Rabe and Staats, arXiv 2112.05682, as they come with torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.sequence_attention import sequence_attention
from paceline.machine.device import PLANNED, capability, is_gpu

PREFER_SHORT = True
"""Take our own kernel for short sequences where it can run: 1.5 to 1.9 times as fast as FlashAttention-2 on an H200,
by benchmarks/attention_kernels.py."""

FLASH_CAPABILITY = (8, 0)
"""Smallest compute capability that torch's FlashAttention runs on."""

Gradients = tuple[Tensor, Tensor, Tensor]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention within each of the sequences that stand one after the other.

    Args:
        q, k, v: [T, H, D]; the last dimension contiguous, the others with any strides.
        cu_seqlens: int32 [P + 1] on the same device: sequence p is positions ``cu_seqlens[p]:cu_seqlens[p + 1]``. They
            cover all T positions: kernels leave the output of others unwritten. Sequences may be empty.
        max_length: L; no sequence is longer.
        dropout: share of the attention probabilities that is dropped, from torch's generator of the device.
        scale: of the products of queries and keys; None: ``D ** -0.5``.
        window: a position sees those at most this far away on either side; None: all of its sequence.

    Returns:
        [T, H, D], contiguous.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    width = -1 if window is None else window
    match operator_for(q, max_length, dropout, window):
        case "short":
            from paceline.kernels.short_attention import short_attention

            return short_attention(q, k, v, cu_seqlens, max_length, dropout=dropout, scale=scale)
        case "flash":
            return _flash(q, k, v, cu_seqlens, max_length, dropout, scale, width)[0]  # type: ignore[no-any-return]
        case "efficient":
            return _efficient(q, k, v, cu_seqlens, max_length, dropout, scale)[0]  # type: ignore[no-any-return]
        case "loop":
            return sequence_attention(q, k, v, cu_seqlens, max_length, dropout, scale, width)
        case _:
            return padded_attention(q, k, v, cu_seqlens, max_length, dropout=dropout, scale=scale, window=window)


def varlen_attention_joined(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """``varlen_attention`` of queries, keys and values in one tensor.

    On GPUs its gradient is written as one tensor: a compiler that gets three concatenates them, in a kernel that was
    measured to take twice the time of a copy.

    Args:
        qkv: [T, 3, H, D]: queries, keys, values. The rest as of ``varlen_attention``.

    Returns:
        [T, H, D], contiguous.
    """
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    match operator_for(qkv[:, 0], max_length, dropout, window):
        case "short":
            from paceline.kernels.short_attention import short_attention_joined

            return short_attention_joined(qkv, cu_seqlens, max_length, dropout=dropout, scale=scale)
        case "flash":
            width = -1 if window is None else window
            return _flash_joined(qkv, cu_seqlens, max_length, dropout, scale, width)[0]  # type: ignore[no-any-return]
        case _:
            q, k, v = qkv.unbind(1)
            return varlen_attention(q, k, v, cu_seqlens, max_length, dropout=dropout, scale=scale, window=window)


def operator_for(q: Tensor, max_length: int, dropout: float, window: int | None) -> str:
    """Name of the operator that ``varlen_attention`` takes.

    ``short``: our own kernel. ``flash``: FlashAttention, for bf16 and fp16. ``efficient``: torch's memory-efficient
    kernel, for fp32 and older GPUs. ``loop``: sequence after sequence, on a CPU. ``padded``: what none of these can
    do (a window in fp32, fp64 on a GPU, odd head sizes), at the price of padding.
    """
    if q.device.type == "cpu":
        return "loop"
    if not is_gpu(q.device):
        return "padded"
    if PREFER_SHORT and window is None:
        from paceline.kernels.short_attention import supports

        if supports(q, max_length) is None:
            return "short"
    half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if half and size % 8 == 0 and size <= 256 and _capability(q.device) >= FLASH_CAPABILITY:
        return "flash"
    # its backward pass drops other probabilities than its forward pass when sequences are given by their bounds (torch
    # 2.11, tests/gpu/test_packing.py)
    if window is None and dropout == 0 and (half or q.dtype == torch.float32) and size % 8 == 0:
        return "efficient"
    return "padded"


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of this GPU; a tensor that is traced where there is none counts as on a recent one."""
    has_one = device.type == PLANNED or torch.cuda.is_available()
    return capability(device) if has_one else FLASH_CAPABILITY


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The same as ``varlen_attention``, in plain torch on any device: pads, masks, and takes the padding out again."""
    positions, within = (torch.arange(n, device=q.device) for n in (q.shape[0], max_length))
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    real = within < lengths[:, None]  # [P, L]
    rows = (starts[:, None] + within).clamp(max=q.shape[0] - 1)
    queries, keys, values = (
        t.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2) for t in (q, k, v)
    )
    seen = real[:, None, :]
    if window is not None:
        seen = seen & ((within[:, None] - within).abs() <= window)
    # padding sees everything: a softmax over nothing is not a number, and no one reads this one
    seen = seen | ~real[:, :, None]
    seen = seen[:, None]  # [P, 1 for all heads, L or 1, L]
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, dropout_p=dropout, scale=scale)
    which = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True).clamp(max=len(starts) - 1)
    back = which * max_length + positions - starts.index_select(0, which)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, back)


# -- FlashAttention ----------------------------------------------------------------------------------------------------
#
# torch.nn.attention.varlen wraps the same kernel, without its dropout.


@torch.library.custom_op("paceline::flash_varlen", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [T, H, D], logarithms of the softmax's sums [H, T], and the random state of the dropout: [2] and []."""
    return _run_flash(q, k, v, cu_seqlens, max_length, dropout, scale, window)


@_flash.register_fake
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


_flash.register_autograd(_differentiate_flash, setup_context=_keep)


@torch.library.custom_op("paceline::flash_varlen_joined", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _flash_joined(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash`` of [T, 3, H, D]."""
    q, k, v = qkv.unbind(1)
    return _run_flash(q, k, v, cu_seqlens, max_length, dropout, scale, window)


@_flash_joined.register_fake
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


_flash_joined.register_autograd(_differentiate_flash_joined, setup_context=_keep_flash_joined)


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
def _efficient(
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


@_efficient.register_fake
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


_efficient.register_autograd(_differentiate_efficient, setup_context=_keep)
