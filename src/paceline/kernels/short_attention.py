"""Attention with dropout over a packed row of short sequences: written for lengths up to about 512 and small heads.

Shapes: T positions of the packed row, H heads, D head dimension, P sequences in the row.

Below a length of about 512 attention is bound by the exponential and the other elementwise work as much as by the
matrix products. Three things follow, and they are what these kernels do differently from general ones:

- **Dropout costs four instructions an element.** Each call draws two random 32-bit keys a position. Query i and key j
  of head h meet in the product ``query_key[i] * key_key[j] * factor[h] mod 2**32``, and the element is dropped where
  that is below ``dropout * 2**32``. Multiplication by a random number is a nearly pairwise independent hash
  (Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem", 1997), and the factor of the
  head is folded into one side once a tile. A counter-based generator such as Philox costs some thirty instructions.
- **Tiles are small**, because a sequence of 273 positions fills three tiles of 128 badly, and several small programs a
  multiprocessor overlap one another's exponentials and matrix products.
- **Only the last tile of a sequence is masked**, and nothing where zeroes loaded in place of missing rows do no harm.

The backward pass is two kernels, one for the gradient of the queries and one for keys and values: seven matrix
products, no atomic additions, the same bits every time. One kernel that does both needs five, but an own sum in memory
for the queries; compiled for compute capability 9.0 it took more instructions an element than the two together, and
registers for half as many programs a multiprocessor.

The online softmax is Milakov and Gimelshein's (2018), the tiling and the recomputation in the backward pass are
FlashAttention's (Dao et al., 2022; Dao, 2023). The softmax is computed in base 2: ``exp(x) = exp2(x * log2(e))``.

Each operator comes twice: for q, k and v, and for the three in one tensor, whose backward pass writes one gradient
tensor in place of three that somebody would have to put together again.

The operators are registered wherever torch is; to run them needs Triton.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, threshold
from paceline.machine.device import PLANNED, capability, is_gpu

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
            _attend_kernel, grid,
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
        launch(_query_gradient_kernel, grid, *tensors, out, dq, *strides, *numbers, **_options(blocks, dim, dropout))
        blocks = KEY_GRADIENT[dim]
        grid = (_tiles(max_length, blocks.keys), heads, sequences)
        launch(_key_gradient_kernel, grid, *tensors, dk, dv, *strides, *numbers, **_options(blocks, dim, dropout))


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


# ---- the kernels ---------------------------------------------------------------------------------------------------
# M queries by N keys a tile. A program finds its sequence's [begin, begin + length) in cu_seqlens and leaves at once
# when its tile lies outside. The sequence is the slowest axis of the grid: programs start in the order of the row.

if HAS_TRITON:
    import triton
    import triton.language as tl

    # numbers that change from call to call: a specialised kernel for each would be compiled in mid-run
    _jit = triton.jit(
        do_not_specialize=("total", "keys_stride", "threshold"), do_not_specialize_on_alignment=("cu_seqlens", "keys")
    )

    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

    @triton.jit
    def _head_factor(head):
        """An odd multiplier a head: the finaliser of MurmurHash3 (Appleby, public domain) of its number.

        It must mix well: were the factors of two heads in the ratio of small numbers, their masks would be alike.
        """
        x = (head + 1).to(tl.uint32) * 0x9E3779B1
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) * 0xC2B2AE35
        return ((x ^ (x >> 16)) | 1).to(tl.int32, bitcast=True)

    @triton.jit
    def _sequence(cu_seqlens, index):
        """Where it begins, and its length."""
        begin = tl.load(cu_seqlens + index)
        return begin, tl.load(cu_seqlens + index + 1) - begin

    @triton.jit
    def _load_rows(base, first, stride, length, R: tl.constexpr, D: tl.constexpr):
        """R rows [R, D] from ``first`` on; zero from ``length`` on."""
        rows = tl.arange(0, R)
        pointers = base + first * stride + (rows[:, None] * stride + tl.arange(0, D)[None, :])
        return tl.load(pointers, mask=rows[:, None] < length - first, other=0.0)

    @triton.jit
    def _load_row_keys(keys, first, R: tl.constexpr, DROPOUT: tl.constexpr):
        """The random keys [R] of these positions; what is read beyond a sequence's end is not used."""
        rows = tl.arange(0, R)
        if DROPOUT:
            rows = tl.load(keys + first + rows)
        return rows

    @triton.jit
    def _drop(first, second, query_keys, key_keys, threshold):
        """Both tiles, with zero where the product of the keys is below the threshold.

        In PTX because from ``tl.where`` the compiler gathers all comparisons first, has too few predicate registers for
        them, and packs them into integers and out again: ten instructions an element instead of three or four.
        """
        if INTERPRETED:
            keep = query_keys * key_keys >= threshold
            first, second = tl.where(keep, first, 0.0), tl.where(keep, second, 0.0)
        else:
            first, second = tl.inline_asm_elementwise(
                """{ .reg .pred dropped; .reg .b32 product;
                mul.lo.s32 product, $4, $5;
                setp.lt.s32 dropped, product, $6;
                selp.f32 $0, 0f00000000, $2, dropped;
                selp.f32 $1, 0f00000000, $3, dropped; }""",
                "=&f,=f,f,f,r,r,r",
                [first, second, query_keys, key_keys, threshold],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        return first, second

    @_jit
    def _attend_kernel(
        q, k, v, out, log_sums, cu_seqlens, keys, total, keys_stride,
        q_stride, q_head, k_stride, k_head, v_stride, v_head,
        scale, threshold, keep_inverse,
        D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """A program: one tile of queries against all keys of its sequence."""
        head = tl.program_id(1)
        begin, length = _sequence(cu_seqlens, tl.program_id(2))
        first = tl.program_id(0) * M
        if first >= length:
            return
        position = begin.to(tl.int64)
        k += position * k_stride + head * k_head
        v += position * v_stride + head * v_head
        q_tile = _load_rows(q + position * q_stride + head * q_head, first, q_stride, length, M, D)
        query_keys = _load_row_keys(keys + begin, first, M, DROPOUT) * _head_factor(head)
        key_keys = keys + keys_stride + begin
        highest = tl.full((M,), float("-inf"), tl.float32)
        sums = tl.zeros((M,), tl.float32)
        weighted = tl.zeros((M, D), tl.float32)
        tile_keys = _load_row_keys(key_keys, 0, N, DROPOUT)
        for start in range(0, length, N):
            k_tile = _load_rows(k, start, k_stride, length, N, D)
            v_tile = _load_rows(v, start, v_stride, length, N, D)
            scores = tl.dot(q_tile, tl.trans(k_tile))
            if start + N > length:
                scores = tl.where((tl.arange(0, N) < length - start)[None, :], scores, float("-inf"))
            # finite from the first tile on, because no tile is empty: -inf - -inf cannot happen
            higher = tl.maximum(highest, tl.max(scores, 1) * scale)
            probability = tl.exp2(scores * scale - higher[:, None])
            shrink = tl.exp2(highest - higher)
            sums = sums * shrink + tl.sum(probability, 1)
            if DROPOUT:
                probability, _ = _drop(probability, probability, query_keys[:, None], tile_keys[None, :], threshold)
                # fetched a tile ahead by hand: Triton's pipeline would send each thread's copies through shared memory
                tile_keys = _load_row_keys(key_keys, start + N, N, DROPOUT)
            weighted = tl.dot(probability.to(v_tile.dtype), v_tile, weighted * shrink[:, None])
            highest = higher
        inside = tl.arange(0, M) < length - first
        weighted *= (keep_inverse / sums)[:, None]
        _store_rows(out + head * D, weighted, position, tl.num_programs(1) * D, first, length, M, D)
        log_sums += head.to(tl.int64) * total + begin + first
        tl.store(log_sums + tl.arange(0, M), highest + tl.log2(sums), mask=inside)

    @triton.jit
    def _store_rows(base, tile, position, stride, first, length, R: tl.constexpr, D: tl.constexpr):
        """R rows [R, D] of this sequence into the head's part of a row that begins at ``base``."""
        rows = tl.arange(0, R)
        base += (position + first) * stride
        pointers = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=rows[:, None] < length - first)

    @triton.jit
    def _differentiate_softmax(
        scores, dp, log_sums, deltas, query_keys, key_keys, scale, threshold, DROPOUT: tl.constexpr
    ):  # fmt: skip
        """Probabilities [M, N] after dropout, and the gradient of the scores, both short of 1 / (1 - dropout).

        Of the queries come, [M]: base-2 logarithms of the softmax's denominators, deltas = rowsum(grad * out) times
        (1 - dropout), random keys; of the keys, [N], their random keys.
        """
        probability = tl.exp2(scores * scale - log_sums[:, None])
        kept = probability
        if DROPOUT:
            kept, dp = _drop(probability, dp, query_keys[:, None], key_keys[None, :], threshold)
        return kept, probability * (dp - deltas[:, None])

    @_jit
    def _query_gradient_kernel(
        q, k, v, grad, log_sums, deltas, cu_seqlens, keys, total, keys_stride, out, dq_out,
        q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, gradient_stride,
        scale, scale_log2, threshold, keep,
        D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """A program: one tile of queries against all keys; on the way the deltas, for the kernel that comes after."""
        head = tl.program_id(1)
        begin, length = _sequence(cu_seqlens, tl.program_id(2))
        first = tl.program_id(0) * M
        if first >= length:
            return
        position = begin.to(tl.int64)
        k += position * k_stride + head * k_head
        v += position * v_stride + head * v_head
        heads = tl.num_programs(1)
        q_tile = _load_rows(q + position * q_stride + head * q_head, first, q_stride, length, M, D)
        grad_tile = _load_rows(grad + position * grad_stride + head * grad_head, first, grad_stride, length, M, D)
        out_tile = _load_rows(out + (position * heads + head) * D, first, heads * D, length, M, D)
        delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1) * keep
        rows = head.to(tl.int64) * total + begin + first + tl.arange(0, M)
        inside = tl.arange(0, M) < length - first
        tl.store(deltas + rows, delta, mask=inside)
        log_sum = tl.load(log_sums + rows, mask=inside, other=float("inf"))
        query_keys = _load_row_keys(keys + begin, first, M, DROPOUT) * _head_factor(head)
        key_keys = keys + keys_stride + begin
        dq = tl.zeros((M, D), tl.float32)
        tile_keys = _load_row_keys(key_keys, 0, N, DROPOUT)
        for start in range(0, length, N):
            k_tile = _load_rows(k, start, k_stride, length, N, D)
            v_tile = _load_rows(v, start, v_stride, length, N, D)
            scores = tl.dot(q_tile, tl.trans(k_tile))
            dp = tl.dot(grad_tile, tl.trans(v_tile))
            if start + N > length:
                # a probability beyond the end may overflow, and infinity times the zero that was loaded is not zero
                scores = tl.where((tl.arange(0, N) < length - start)[None, :], scores, float("-inf"))
            _, ds = _differentiate_softmax(
                scores, dp, log_sum, delta, query_keys, tile_keys, scale_log2, threshold, DROPOUT
            )
            if DROPOUT:
                tile_keys = _load_row_keys(key_keys, start + N, N, DROPOUT)
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
        _store_rows(dq_out + head * D, dq * (scale / keep), position, gradient_stride, first, length, M, D)

    @_jit
    def _key_gradient_kernel(
        q, k, v, grad, log_sums, deltas, cu_seqlens, keys, total, keys_stride, dk_out, dv_out,
        q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, gradient_stride,
        scale, scale_log2, threshold, keep,
        D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """A program: one tile of keys against all queries. Nothing is masked: a missing query has an infinite log sum,
        hence probability 0, and a missing key spoils only its own row, which is not stored."""
        head = tl.program_id(1)
        begin, length = _sequence(cu_seqlens, tl.program_id(2))
        first = tl.program_id(0) * N
        if first >= length:
            return
        position = begin.to(tl.int64)
        q += position * q_stride + head * q_head
        grad += position * grad_stride + head * grad_head
        log_sums += head.to(tl.int64) * total + begin
        deltas += head.to(tl.int64) * total + begin
        k_tile = _load_rows(k + position * k_stride + head * k_head, first, k_stride, length, N, D)
        v_tile = _load_rows(v + position * v_stride + head * v_head, first, v_stride, length, N, D)
        key_keys = _load_row_keys(keys + keys_stride + begin, first, N, DROPOUT) * _head_factor(head)
        rows = tl.arange(0, M)
        dk = tl.zeros((N, D), tl.float32)
        dv = tl.zeros((N, D), tl.float32)
        for start in range(0, length, M):
            inside = rows < length - start
            q_tile = _load_rows(q, start, q_stride, length, M, D)
            grad_tile = _load_rows(grad, start, grad_stride, length, M, D)
            log_sum = tl.load(log_sums + start + rows, mask=inside, other=float("inf"))
            delta = tl.load(deltas + start + rows, mask=inside, other=0.0)
            query_keys = _load_row_keys(keys + begin, start, M, DROPOUT)
            scores = tl.dot(q_tile, tl.trans(k_tile))
            dp = tl.dot(grad_tile, tl.trans(v_tile))
            kept, ds = _differentiate_softmax(
                scores, dp, log_sum, delta, query_keys, key_keys, scale_log2, threshold, DROPOUT
            )
            dv = tl.dot(tl.trans(kept.to(grad_tile.dtype)), grad_tile, dv)
            dk = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, dk)
        _store_rows(dk_out + head * D, dk * (scale / keep), position, gradient_stride, first, length, N, D)
        _store_rows(dv_out + head * D, dv / keep, position, gradient_stride, first, length, N, D)
