"""Attention with dropout over a packed row of short sequences: written for lengths up to about 512 and small heads.

Each operator comes twice: for q, k and v, and for the three in one tensor, whose backward pass writes one gradient
tensor in place of three that somebody would have to put together again. What they launch, and why it is written so,
is in ``short_attention_kernels``.

The operators are registered wherever torch is; to run them needs Triton.

Shapes: T positions of the packed row, H heads, D head dimension, P sequences in the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, threshold
from paceline.machine.device import PLANNED, capability, is_gpu

if HAS_TRITON:
    from paceline.kernels.short_attention_kernels import (
        short_attention_forward,
        short_attention_key_gradient,
        short_attention_query_gradient,
    )

LONGEST: Final = 1024
"""Longer sequences are better served by a kernel made for them."""
_OVERREAD: Final = 256
"""Random keys are read without a mask, up to two tiles beyond a sequence's end; what is read there is not used."""


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut: rows of a tile of queries and of keys, warps a program, tiles in flight, and registers a
    thread (None: as many as the compiler likes). 168 let three programs of four warps share a multiprocessor, 128 four.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# By head dimension. Fixed rather than tuned at run time: a search would run in the first step of a user's training.
# Tiles have 64 queries at least, so that Hopper's asynchronous matrix instructions apply. Those of head dimension 64
# are the best of benchmarks/attention_kernels.py --sweep on an H200; the others were chosen by registers, spills and
# occupancy as compiled for compute capability 9.0.
FORWARD: Final[dict[int, Blocks]] = {
    32: Blocks(64, 64, 4, 3),
    64: Blocks(64, 64, 4, 3, 128),
    128: Blocks(64, 64, 4, 2),
}
QUERY_GRADIENT: Final[dict[int, Blocks]] = {
    32: Blocks(64, 64, 4, 3, 168),
    64: Blocks(64, 32, 4, 3, 96),
    128: Blocks(64, 64, 4, 2),
}
KEY_GRADIENT: Final[dict[int, Blocks]] = {
    32: Blocks(64, 64, 4, 2, 168),
    64: Blocks(64, 64, 4, 2, 168),
    128: Blocks(64, 64, 8, 1),
}


def supports(q: Tensor, max_length: int) -> str | None:
    """Why ``short_attention`` cannot serve queries like ``q`` [T, H, D] here, or None where it can."""
    if not HAS_TRITON and q.device.type != PLANNED:
        return "Triton is not installed"
    if not is_gpu(q.device) or torch.version.hip is not None:
        return f"it is written for NVIDIA GPUs, and the tensors are on {'ROCm' if q.is_cuda else q.device.type}"
    if q.ndim != 3:
        return f"the queries should be [positions, heads, head dimension] and are {tuple(q.shape)}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16, and the tensors are {str(q.dtype).removeprefix('torch.')}"
    if q.shape[2] not in FORWARD:
        return f"the head dimension is {q.shape[2]}, and it knows {', '.join(map(str, FORWARD))}"
    if q.stride(2) != 1:
        return "the last dimension of the queries is not contiguous"
    if max_length > LONGEST:
        return f"sequences may be {max_length} long, and it is made for {LONGEST} at most"
    have = capability(q.device)
    if have < (8, 0):
        return f"it needs compute capability 8.0, and the GPU has {have[0]}.{have[1]}"
    return None


def short_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of every sequence of a packed row within itself; not causal. Differentiable once.

    Args:
        q, k, v: [T, H, D] bf16 or fp16, last dimension contiguous, the others with any strides: views of a fused
            [T, 3 H D] matrix or of [1, H, T, D] are read where they lie.
        cu_seqlens: int32 [P + 1] on the same device: sequence p is positions ``cu_seqlens[p]:cu_seqlens[p + 1]``. It
            should cover the whole row: the output at positions that no sequence covers is undefined. Sequences of
            length 0 are legal. Fastest when the longest come first, so that the short ones fill the gaps at the end.
        max_length: no sequence is longer; positions beyond it are not computed. It shapes the launch, so keep it
            constant.
        dropout: share of the attention probabilities that is dropped. The random keys come from torch's default
            generator of the device, on the device: ``torch.manual_seed`` governs them, and every replay of a captured
            CUDA graph draws anew.
        scale: of the scores, positive; ``D ** -0.5`` unless told.

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: shapes, types or numbers that do not fit. What ``supports`` says is not checked again.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.paceline.short_attention(q, k, v, cu_seqlens, max_length, dropout, scale)[0]
    return out


def short_attention_joined(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """``short_attention`` of queries, keys and values in one tensor, whose gradient is one contiguous tensor too.

    Args:
        qkv: [T, 3, H, D]: queries, keys, values. The rest as of ``short_attention``.

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: shapes, types or numbers that do not fit.
    """
    scale = qkv.shape[3] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.paceline.short_attention_joined(qkv, cu_seqlens, max_length, dropout, scale)[0]
    return out


# ---- the operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("paceline::short_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Out [T, H, D]; log2 of each softmax's denominator, fp32 [H, T]; the keys of dropout, int32 [2, more than T] or
    [2, 0]."""
    return _attend(q, k, v, cu_seqlens, max_length, dropout, scale)


@torch.library.custom_op("paceline::short_attention_joined", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward_joined(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_forward``, of [T, 3, H, D]."""
    if qkv.ndim != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv should be [T, 3, H, D] and is {tuple(qkv.shape)}")
    q, k, v = qkv.unbind(1)
    return _attend(q, k, v, cu_seqlens, max_length, dropout, scale)


@torch.library.custom_op("paceline::short_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    keys: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each [T, H, D] contiguous, from ``grad`` [T, H, D] of the output."""
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    _differentiate_into((dq, dk, dv), grad, (q, k, v), out, log_sums, cu_seqlens, keys, max_length, dropout, scale)
    return dq, dk, dv


@torch.library.custom_op("paceline::short_attention_joined_backward", mutates_args=())
def _backward_joined(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    keys: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
) -> Tensor:
    """Gradient of qkv, [T, 3, H, D] contiguous: every third of it is written where it belongs."""
    joined = qkv.new_empty(qkv.shape)
    _differentiate_into(
        joined.unbind(1), grad, qkv.unbind(1), out, log_sums, cu_seqlens, keys, max_length, dropout, scale
    )
    return joined


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(q, dropout)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, cu_seqlens: Tensor, keys: Tensor,
    max_length: int, dropout: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


@_forward_joined.register_fake
def _(qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(qkv[:, 0], dropout)


@_backward_joined.register_fake
def _(grad: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.max_length, ctx.dropout, ctx.scale = inputs
    out, log_sums, keys = output
    ctx.save_for_backward(q, k, v, out, log_sums, cu_seqlens, keys)
    ctx.set_materialize_grads(False)  # the other two outputs have no gradient: make no zeroes for them


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = torch.ops.paceline.short_attention_backward(
        grad, *ctx.saved_tensors, ctx.max_length, ctx.dropout, ctx.scale
    )
    return dq, dk, dv, None, None, None, None


def _save_joined(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, cu_seqlens, ctx.max_length, ctx.dropout, ctx.scale = inputs
    out, log_sums, keys = output
    ctx.save_for_backward(qkv, out, log_sums, cu_seqlens, keys)
    ctx.set_materialize_grads(False)


def _differentiate_joined(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    found = torch.ops.paceline.short_attention_joined_backward(
        grad, *ctx.saved_tensors, ctx.max_length, ctx.dropout, ctx.scale
    )
    return found, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
_forward_joined.register_autograd(_differentiate_joined, setup_context=_save_joined)


# ---- what they run -------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of the forward operators; q, k and v may be views of one tensor."""
    _check(q, k, v, cu_seqlens, dropout, scale)
    out, log_sums, keys = _outputs(q, dropout)
    if dropout > 0:
        # two keys a position: one for its part as a query, one for its part as a key
        keys.random_(-(2**31), 2**31)
    length, heads, dim = q.shape
    blocks = FORWARD[dim]
    strides = tuple(tensor.stride(axis) for tensor in (q, k, v) for axis in (0, 1))
    numbers = (scale * math.log2(math.e), threshold(dropout), 1 / (1 - dropout))
    grid = (_tiles(max_length, blocks.queries), heads, cu_seqlens.shape[0] - 1)
    with torch.cuda.device_of(q):
        launch(
            short_attention_forward, grid,
            q, k, v, out, log_sums, cu_seqlens, keys, length, keys.shape[1], *strides, *numbers,
            **_options(blocks, dim, dropout),
        )  # fmt: skip
    return out, log_sums, keys


def _differentiate_into(
    gradients: Sequence[Tensor],
    grad: Tensor,
    states: Sequence[Tensor],
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    keys: Tensor,
    max_length: int,
    dropout: float,
    scale: float,
) -> None:
    """Write the gradients of ``states`` (q, k and v) into ``gradients``: [T, H, D] of one stride between positions,
    heads contiguous; the three may be views of one tensor."""
    (dq, dk, dv), (q, k, v) = gradients, states
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    length, heads, dim = q.shape
    deltas = torch.empty_like(log_sums)
    sequences = cu_seqlens.shape[0] - 1
    tensors = (q, k, v, grad, log_sums, deltas, cu_seqlens, keys, length, keys.shape[1])
    strides = (*(tensor.stride(axis) for tensor in (q, k, v, grad) for axis in (0, 1)), dq.stride(0))
    numbers = (scale, scale * math.log2(math.e), threshold(dropout), 1 - dropout)
    with torch.cuda.device_of(q):
        blocks = QUERY_GRADIENT[dim]
        grid = (_tiles(max_length, blocks.queries), heads, sequences)
        options = _options(blocks, dim, dropout)
        launch(short_attention_query_gradient, grid, *tensors, out, dq, *strides, *numbers, **options)
        blocks = KEY_GRADIENT[dim]
        grid = (_tiles(max_length, blocks.keys), heads, sequences)
        options = _options(blocks, dim, dropout)
        launch(short_attention_key_gradient, grid, *tensors, dk, dv, *strides, *numbers, **options)


def _outputs(q: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    length, heads, _ = q.shape
    keys = q.new_empty((2, length + _OVERREAD if dropout > 0 else 0), dtype=torch.int32)
    return q.new_empty(q.shape), q.new_empty((heads, length), dtype=torch.float32), keys


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, dropout: float, scale: float) -> None:
    if not HAS_TRITON:
        raise RuntimeError("short_attention needs Triton, which is not installed; supports() tells beforehand")
    if q.ndim != 3 or not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q, k and v should be [T, H, D] of one shape and type, and are {found}")
    if q.shape[2] not in FORWARD:
        raise ValueError(f"the head dimension is {q.shape[2]}, and short_attention knows {sorted(FORWARD)}")
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        raise ValueError("the last dimension of q, k and v should be contiguous")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens should be contiguous int32 [P + 1], and is {cu_seqlens.dtype} {cu_seqlens.shape}")
    if not 0 <= dropout < 1 or not scale > 0:
        raise ValueError(f"dropout should be in [0, 1) and scale positive; they are {dropout} and {scale}")


def _tiles(rows: int, block: int) -> int:
    return -(-rows // block)


def _options(blocks: Blocks, dim: int, dropout: float) -> dict[str, Any]:
    return {
        "D": dim,
        "M": blocks.queries,
        "N": blocks.keys,
        "DROPOUT": dropout > 0,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "maxnreg": blocks.registers,
    }
