"""Attention of one query a sequence against all positions of its sequence, over a packed row.

It is what is left of the attention of an encoder's last block when only one position of each text is read after it.
All that takes time is to read the keys and values, once forward and once backward, and to write their gradients. So
the kernels multiply by hand, without the matrix units: a program takes one head of one sequence and walks over tiles of
its positions. Three things follow from there being one query only:

- **A softmax a row of the tile.** Row i of each tile meets keys i, i + N, i + 2 N and so on, and keeps an online
  softmax of its own; they are joined once, after the last tile. Nothing inside the loop waits for another warp.
- **Dropout draws a number for each probability.** There are as many as positions and heads, a few bytes beside each
  position's keys and values, so that nothing is to be had from hashing fewer numbers, as ``short_attention`` does.
- **One kernel is the backward pass.** Each position belongs to one query: its gradients are final when they are
  written. No atomic additions, the same bits every time.

Elsewhere than on GPUs with Triton the sequences are padded to one length, for torch's own attention.

Shapes: T positions of the row, H heads, D head size, P sequences, L length of the longest, N positions of a tile.
Source: the online softmax is Milakov and Gimelshein's (arXiv 1805.02867), the backward pass from the kept logarithm of
the softmax's sum FlashAttention's (Dao et al., arXiv 2205.14135). ``exp(x)`` is computed as ``exp2(x * log2(e))``.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, threshold
from paceline.kernels.short_attention import supports

TILE_ELEMENTS: Final = 4096
"""Elements of a tile of keys, [N, D]; as many of values, and fp32 sums of that size."""
WARPS: Final = 4
STAGES: Final = 3
"""Tiles in flight."""

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def one_query_attention(
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of each sequence's one query over the keys and values of its sequence. Differentiable once.

    Nothing here waits for the device, and all of it may be captured in a graph, whose replays draw anew.

    Args:
        q: [P, H, D], query p of sequence p; the last dimension contiguous, the others with any strides.
        kv: [T, 2, H, D]: keys and values of all positions, of q's type; strides as of q. Its gradient is one
            contiguous tensor.
        cu_seqlens: int32 [P + 1] on the same device: sequence p is positions ``cu_seqlens[p]:cu_seqlens[p + 1]``. They
            cover all T positions: kernels leave the gradient of others unwritten. Sequences may be empty: their output
            is 0, and so is the gradient of their query.
        max_length: L; no sequence is longer.
        dropout: share of the attention probabilities that is dropped, from torch's generator of the device.
        scale: of the products of queries and keys; None: ``D ** -0.5``.

    Returns:
        [P, H, D], contiguous.

    Raises:
        ValueError: shapes, types or numbers that do not fit.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, kv = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv))
    match operator_for(q):
        case "kernel":
            out: Tensor = torch.ops.paceline.one_query_attention(q, kv, cu_seqlens, dropout, scale)[0]
            return out
        case "loop":
            return looped_one_query(q, kv, cu_seqlens, dropout, scale)
        case _:
            return padded_one_query(q, kv, cu_seqlens, max_length, dropout, scale)


def operator_for(q: Tensor) -> str:
    """What ``one_query_attention`` takes for queries like ``q`` [P, H, D].

    ``kernel`` where it runs; ``loop`` on a CPU, where sequences cost nothing to tell apart; ``padded`` on other GPUs,
    and for a compiler, which has no lengths to go by.
    """
    # the same GPUs, types and head sizes; no sequence is too long for a loop over its keys
    if supports(q, max_length=0) is None:
        return "kernel"
    return "loop" if q.device.type == "cpu" and not torch.compiler.is_compiling() else "padded"


def looped_one_query(q: Tensor, kv: Tensor, cu_seqlens: Tensor, dropout: float, scale: float) -> Tensor:
    """The same as ``one_query_attention``, sequence after sequence: no memory but that of their own keys."""
    _check(q, kv, cu_seqlens, dropout)
    bounds, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
    if not any(lengths):
        return _of_nothing(q, kv)
    # split, not sliced: the gradients of slices are as many tensors of the whole row's size
    parts = kv.split([bounds[0], *lengths, kv.shape[0] - bounds[-1]])[1:-1]
    found = []
    for query, part in zip(q.unbind(), parts, strict=True):
        if not len(part):
            found.append(torch.zeros_like(query))
            continue
        keys, values = part.permute(1, 2, 0, 3)
        found.append(F.scaled_dot_product_attention(query[:, None], keys, values, None, dropout, scale=scale)[:, 0])
    return torch.stack(found)


def padded_one_query(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_length: int, dropout: float, scale: float
) -> Tensor:
    """The same as ``one_query_attention`` in plain torch on any device: keys and values padded to [P, L, 2, H, D]."""
    _check(q, kv, cu_seqlens, dropout)
    if 0 in (q.shape[0], kv.shape[0], max_length):
        return _of_nothing(q, kv)
    bounds = cu_seqlens.long()[:, None]
    within = torch.arange(torch.sym_min(max_length, kv.shape[0]), device=q.device)
    positions, last = bounds[:-1] + within, bounds[1:] - 1
    empty = bounds[1:] == bounds[:-1]
    # an empty sequence sees a neighbour: a softmax over nothing is not a number. Neither it nor its gradient gets out
    seen = (positions <= last) | empty
    q = q.masked_fill(empty[:, :, None], 0.0)
    # padding repeats the last position of its own sequence: what is not finite in one sequence stays there
    rows = torch.minimum(positions, last).clamp(min=0)
    keys, values = kv.index_select(0, rows.flatten()).unflatten(0, rows.shape).unbind(2)
    out = F.scaled_dot_product_attention(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), seen[:, None, None], dropout, scale=scale
    )
    return out.squeeze(2).masked_fill(empty[:, :, None], 0.0).contiguous()


def _of_nothing(q: Tensor, kv: Tensor) -> Tensor:
    """Zeros; sums over nothing give both the gradient that they should have, 0."""
    return q.new_zeros(q.shape) + q[:0].sum(0) + kv[:0].sum((0, 1))


def _check(q: Tensor, kv: Tensor, cu_seqlens: Tensor, dropout: float) -> None:
    if q.ndim != 3 or kv.ndim != 4 or kv.shape[1:] != (2, *q.shape[1:]) or q.dtype != kv.dtype:
        found = f"{tuple(q.shape)} {q.dtype} and {tuple(kv.shape)} {kv.dtype}"
        raise ValueError(f"q and kv should be [P, H, D] and [T, 2, H, D] of one type, and are {found}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.shape != (q.shape[0] + 1,):
        found = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens should be int32 [P + 1] for the {q.shape[0]} queries of q, and is {found}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout should be in [0, 1), and is {dropout}")


# ---- the operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("paceline::one_query_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward(q: Tensor, kv: Tensor, cu_seqlens: Tensor, dropout: float, scale: float) -> Found:
    """Out [P, H, D]; the same in fp32; log2 of each softmax's denominator, fp32 [P, H]; the draws of dropout, int32
    [H, T] or [H, 0].

    The gradients of a softmax's scores add up to 0, and the query's is their sum, weighted with the keys. Where the
    keys have much in common, as those of trained models do, that cancels out only if the output's error is small.
    """
    _check(q, kv, cu_seqlens, dropout)
    if not HAS_TRITON:
        raise RuntimeError("paceline::one_query_attention needs Triton; operator_for tells where it can run")
    if not q.stride(2) == kv.stride(3) == 1:
        raise ValueError("the last dimension of q and kv should be contiguous")
    out, exact, log_sums, draws = _outputs(q, kv, cu_seqlens, dropout, scale)
    if dropout > 0:
        draws.random_(-(2**31), 2**31)
    numbers = (scale * math.log2(math.e), threshold(dropout), 1 / (1 - dropout))
    with torch.cuda.device_of(q):
        launch(
            _attend_kernel,
            _grid(q),
            *(q, kv, out, exact, log_sums, cu_seqlens.contiguous(), draws, kv.shape[0]),
            *(*q.stride()[:2], *kv.stride()[:3], *numbers),
            **_options(q, dropout),
        )
    return out, exact, log_sums, draws


@torch.library.custom_op("paceline::one_query_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    exact: Tensor,
    log_sums: Tensor,
    draws: Tensor,
    cu_seqlens: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of q [P, H, D] and kv [T, 2, H, D], contiguous, from ``grad`` [P, H, D] of the output."""
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    dq, dkv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    numbers = (scale, scale * math.log2(math.e), threshold(dropout), 1 / (1 - dropout))
    with torch.cuda.device_of(q):
        launch(
            _differentiate_kernel,
            _grid(q),
            *(grad, q, kv, exact, log_sums, dq, dkv, cu_seqlens.contiguous(), draws, kv.shape[0]),
            *(*grad.stride()[:2], *q.stride()[:2], *kv.stride()[:3], *numbers),
            **_options(q, dropout),
        )
    return dq, dkv


@_forward.register_fake
def _outputs(q: Tensor, kv: Tensor, cu_seqlens: Tensor, dropout: float, scale: float) -> Found:
    draws = q.new_empty((q.shape[1], kv.shape[0] if dropout > 0 else 0), dtype=torch.int32)
    exact, log_sums = (q.new_empty(shape, dtype=torch.float32) for shape in (q.shape, q.shape[:2]))
    return q.new_empty(q.shape), exact, log_sums, draws


@_backward.register_fake
def _(grad: Tensor, q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    q, kv, cu_seqlens, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(q, kv, *output[1:], cu_seqlens)
    ctx.set_materialize_grads(False)  # the other outputs have no gradient: make no zeroes for them


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dq, dkv = torch.ops.paceline.one_query_attention_backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.scale)
    return dq, dkv, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _grid(q: Tensor) -> tuple[int, int]:
    """Heads first: programs that run at the same time read the same rows."""
    return q.shape[1], q.shape[0]


def _options(q: Tensor, dropout: float) -> dict[str, Any]:
    dim = q.shape[2]
    sizes = {"D": dim, "N": TILE_ELEMENTS // dim, "STAGES": STAGES}
    return {**sizes, "DROPOUT": dropout > 0, "num_warps": WARPS}


# ---- the kernels ---------------------------------------------------------------------------------------------------

if HAS_TRITON:
    import triton
    import triton.language as tl

    # numbers that change from call to call: a specialised kernel for each would be compiled in mid-run
    _jit = triton.jit(do_not_specialize=("total", "threshold"), do_not_specialize_on_alignment=("cu_seqlens", "draws"))

    LOWEST = tl.constexpr(-3.0e38)
    """Below every score, and finite: a row that has seen no key subtracts it from itself."""

    @triton.jit
    def _load_pair(base, start, length, value_offset, stride, N: tl.constexpr, D: tl.constexpr):
        """A tile of keys and one of values, fp32 [N, D]; zero from ``length`` on."""
        rows = start + tl.arange(0, N)
        pointers = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
        inside = (rows < length)[:, None]
        keys = tl.load(pointers, mask=inside, other=0.0)
        return keys.to(tl.float32), tl.load(pointers + value_offset, mask=inside, other=0.0).to(tl.float32)

    @_jit
    def _attend_kernel(
        q, kv, out, exact, log_sums, cu_seqlens, draws, total,
        q_stride, q_head, kv_stride, value_offset, kv_head,
        scale, threshold, keep_inverse,
        D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """A program: one head of one sequence."""
        head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - begin).to(tl.int32)
        rows, columns = tl.arange(0, N), tl.arange(0, D)
        query = tl.load(q + sequence * q_stride + head * q_head + columns).to(tl.float32) * scale
        kv += begin * kv_stride + head * kv_head
        draws += head * total + begin
        highest = tl.full((N,), LOWEST, tl.float32)
        sums = tl.zeros((N,), tl.float32)
        weighted = tl.zeros((N, D), tl.float32)
        for start in tl.range(0, length, N, num_stages=STAGES):
            keys, values = _load_pair(kv, start, length, value_offset, kv_stride, N, D)
            inside = rows < length - start
            scores = tl.where(inside, tl.sum(keys * query[None, :], 1), float("-inf"))
            higher = tl.maximum(highest, scores)
            probability = tl.exp2(scores - higher)
            shrink = tl.exp2(highest - higher)
            sums = sums * shrink + probability
            if DROPOUT:
                drawn = tl.load(draws + start + rows, mask=inside, other=0)
                probability = tl.where(drawn >= threshold, probability, 0.0)
            weighted = weighted * shrink[:, None] + probability[:, None] * values
            highest = higher
        top = tl.max(highest, 0)
        shrink = tl.exp2(highest - top)
        whole = tl.sum(sums * shrink, 0)
        # of an empty sequence nothing was added up, and 0 / 1 is 0
        result = tl.sum(weighted * shrink[:, None], 0) * keep_inverse / tl.where(length > 0, whole, 1.0)
        at = sequence * tl.num_programs(0) + head
        tl.store(out + at * D + columns, result.to(out.dtype.element_ty))
        tl.store(exact + at * D + columns, result)
        tl.store(log_sums + at, top + tl.log2(tl.where(length > 0, whole, 1.0)))

    @_jit
    def _differentiate_kernel(
        grad, q, kv, exact, log_sums, dq, dkv, cu_seqlens, draws, total,
        grad_stride, grad_head, q_stride, q_head, kv_stride, value_offset, kv_head,
        scale, scale_log2, threshold, keep_inverse,
        D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    ):  # fmt: skip
        """A program: one head of one sequence. What is computed beyond the sequence's end is zero or not stored."""
        head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        heads = tl.num_programs(0)
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - begin).to(tl.int32)
        rows, columns = tl.arange(0, N), tl.arange(0, D)
        at = sequence * heads + head
        query = tl.load(q + sequence * q_stride + head * q_head + columns).to(tl.float32)
        slope = tl.load(grad + sequence * grad_stride + head * grad_head + columns).to(tl.float32)
        # the softmax's gradient needs the mean of the probabilities' gradients, which is this product
        delta = tl.sum(slope * tl.load(exact + at * D + columns), 0)
        log_sum = tl.load(log_sums + at)
        kv += begin * kv_stride + head * kv_head
        dkv += (begin * 2 * heads + head) * D
        draws += head * total + begin
        query_slope = tl.zeros((N, D), tl.float32)
        for start in tl.range(0, length, N, num_stages=STAGES):
            keys, values = _load_pair(kv, start, length, value_offset, kv_stride, N, D)
            inside = rows < length - start
            scores = tl.where(inside, tl.sum(keys * query[None, :], 1) * scale_log2, float("-inf"))
            probability = tl.exp2(scores - log_sum)
            probability_slope = tl.sum(values * slope[None, :], 1)
            kept = probability
            if DROPOUT:
                drawn = tl.load(draws + start + rows, mask=inside, other=0)
                factor = tl.where(drawn >= threshold, keep_inverse, 0.0)
                kept, probability_slope = probability * factor, probability_slope * factor
            score_slope = probability * (probability_slope - delta) * scale
            query_slope += score_slope[:, None] * keys
            pointers = dkv + (start + rows).to(tl.int64)[:, None] * (2 * heads * D) + columns[None, :]
            key_slope, value_slope = score_slope[:, None] * query[None, :], kept[:, None] * slope[None, :]
            tl.store(pointers, key_slope.to(dkv.dtype.element_ty), mask=inside[:, None])
            tl.store(pointers + heads * D, value_slope.to(dkv.dtype.element_ty), mask=inside[:, None])
        result = tl.sum(query_slope, 0)
        tl.store(dq + at * D + columns, result.to(dq.dtype.element_ty))
