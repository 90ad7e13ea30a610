"""Attention of packed sequences: each position sees its own sequence and nothing else, dropout included.

The operator is chosen by what the host knows: device, number format, shapes. Where the sequences are is data on the
device, so nothing here waits for it, and all of it may be captured in a graph, but for the loop of the CPU.

Shapes: T positions of the row, H heads, D head size, P sequences, L length of the longest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.sequence_attention import sequence_attention
from paceline.kernels.torch_attention import efficient, flash, flash_joined
from paceline.machine.device import PLANNED, capability, is_gpu

PREFER_SHORT = True
"""Take our own kernel for short sequences where it can run: 1.5 to 1.9 times as fast as FlashAttention-2 on an H200,
by benchmarks/attention_kernels.py."""

FLASH_CAPABILITY = (8, 0)
"""Smallest compute capability that torch's FlashAttention runs on."""


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
            return flash(q, k, v, cu_seqlens, max_length, dropout, scale, width)[0]  # type: ignore[no-any-return]
        case "efficient":
            return efficient(q, k, v, cu_seqlens, max_length, dropout, scale)[0]  # type: ignore[no-any-return]
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
            return flash_joined(qkv, cu_seqlens, max_length, dropout, scale, width)[0]  # type: ignore[no-any-return]
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
