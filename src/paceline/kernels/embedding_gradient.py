"""The gradient of an embedding: rows of a table, each the sum of what its occurrences contribute, in a fixed order.

torch sorts 64-bit ids in eight passes, finds out in six more launches where equal ids end, and adds in two: 0.3 ms for
the rows of 17,000 tokens on an H200, and half of it for their 512 positions. Ids below 2^15 need two passes. The sums
then take two kernels: one goes through chunks of the sorted ids and writes rows that end inside of a chunk; the other
joins what was cut. Neither adds in memory, so that equal inputs give equal bits.

Shapes: N ids (all dimensions together), W width, V rows of the table, C chunks of ``CHUNK`` sorted ids.
Source: sorted segments as in torch's EmbeddingBackwardKernel.cu; Merrill and Garland, Merge-based Parallel Sparse
Matrix-Vector Multiplication, SC 2016 (even pieces of uneven segments, and a pass that joins those that were cut).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, runs_kernels

CHUNK: Final = 32
"""Sorted ids that a program adds up one after the other."""
COLUMNS: Final = 256
"""Columns of the gradient that a program takes."""
JOINED: Final = 16
"""Chunks that are added to a cut row at a time."""

NO_PADDING: Final = -1


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """``torch.nn.functional.embedding``, whose gradient is computed here. Differentiable once.

    Args:
        ids: int64, of any shape.
        weight: [V, W].
        padding_idx: the row that gets no gradient; None: each gets its own.

    Returns:
        [..., W], rows of ``weight``.
    """
    row = NO_PADDING if padding_idx is None else padding_idx % len(weight)
    out: Tensor = _Lookup.apply(ids, weight, row)
    return out


class _Lookup(torch.autograd.Function):
    # a Function rather than an operator: compilers see the lookup as it is, and make one kernel of it and what follows
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = weight.shape[0], padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.paceline.embedding_gradient(grads[0], ids, ctx.rows, ctx.padding_idx), None


@torch.library.custom_op("paceline::embedding_gradient", mutates_args=())
def _gradient(grad: Tensor, ids: Tensor, rows: int, padding_idx: int) -> Tensor:
    """[V, W] in the format of ``grad``, [..., W]: sums in fp32 (fp64 of fp64) of its rows, by ids."""
    width, grad = grad.shape[-1], grad.reshape(-1, grad.shape[-1]).contiguous()
    if not runs_kernels(grad) or grad.dtype == torch.float64 or not len(grad):
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        plain: Tensor = torch.ops.aten.embedding_dense_backward(wide, ids.reshape(-1), rows, padding_idx, False)
        return plain.to(grad.dtype)
    # fewer bits, fewer passes
    narrow = torch.int16 if rows <= 2**15 else torch.int32
    keys, order = torch.sort(ids.reshape(-1).to(narrow), stable=True)
    count, chunks, across = len(keys), -(-len(keys) // CHUNK), -(-width // COLUMNS)
    out = grad.new_zeros((rows, width))
    pieces = grad.new_empty((2, chunks, width), dtype=torch.float32)
    sizes = {"W": width, "CHUNK": CHUNK, "BLOCK": COLUMNS, "num_warps": 2}
    with torch.cuda.device_of(grad):
        launch(_sum_kernel, (chunks, across), grad, keys, order, out, pieces, count, padding_idx, **sizes)
        launch(_join_kernel, (chunks, across), keys, out, pieces, count, padding_idx, JOINED=JOINED, **sizes)
    return out


@_gradient.register_fake
def _(grad: Tensor, ids: Tensor, rows: int, padding_idx: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))


if HAS_TRITON:
    import triton
    import triton.language as tl

    _jit = triton.jit(do_not_specialize=("count", "padding_idx"))

    @_jit
    def _sum_kernel(
        grad, keys, order, out, pieces, count, padding_idx,
        W: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A program: the rows of one chunk, in the order of their ids.

        ``pieces`` get what belongs to rows that are cut: [0] of a row that came from the chunk before, [1] of one that
        begins in this chunk and goes on.
        """
        chunk, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        within = column < W
        first, chunks = chunk * CHUNK, tl.num_programs(0)
        last = tl.minimum(first + CHUNK, count)
        key = tl.load(keys + first).to(tl.int32)
        before = tl.load(keys + first - 1, mask=first > 0, other=-1).to(tl.int32)
        comes = (before == key).to(tl.int32)
        sums = tl.zeros((BLOCK,), tl.float32)
        value = tl.load(grad + tl.load(order + first) * W + column, mask=within, other=0.0).to(tl.float32)
        for at in range(first, last):
            sums += value
            # the next row is on its way while this one is written
            inside = at + 1 < last
            place = tl.load(order + at + 1, mask=inside, other=0)
            value = tl.load(grad + place * W + column, mask=within & inside, other=0.0).to(tl.float32)
            following = tl.load(keys + at + 1, mask=at + 1 < count, other=-1).to(tl.int32)
            ends = following != key
            if ends | (at + 1 == last):
                if comes == 1:
                    tl.store(pieces + chunk * W + column, sums, mask=within)
                else:
                    if ends:
                        whole = within & (key != padding_idx)
                        tl.store(out + key.to(tl.int64) * W + column, sums.to(out.dtype.element_ty), mask=whole)
                    else:
                        tl.store(pieces + (chunks + chunk) * W + column, sums, mask=within)
            sums = tl.where(ends, 0.0, sums)
            comes = tl.where(ends, 0, comes)
            key = following

    @_jit
    def _join_kernel(
        keys, out, pieces, count, padding_idx,
        W: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr,
    ):  # fmt: skip
        """A program: the row that begins in this chunk and goes on, if there is one; its pieces in order."""
        chunk, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        within = column < W
        first, chunks = chunk * CHUNK, tl.num_programs(0)
        last = tl.minimum(first + CHUNK, count)
        key = tl.load(keys + last - 1).to(tl.int32)
        following = tl.load(keys + last, mask=last < count, other=-1).to(tl.int32)
        before = tl.load(keys + first - 1, mask=first > 0, other=-1).to(tl.int32)
        if (following == key) & (before != key) & (key != padding_idx):
            sums = tl.load(pieces + (chunks + chunk) * W + column, mask=within, other=0.0)
            at, goes = chunk + 1, 1
            while goes == 1:
                others = at + tl.arange(0, JOINED)
                there = tl.load(keys + others * CHUNK, mask=others < chunks, other=-1).to(tl.int32) == key
                values = tl.load(
                    pieces + others[:, None] * W + column[None, :], mask=there[:, None] & within[None, :], other=0.0
                )
                sums += tl.sum(values, 0)
                goes = tl.min(there.to(tl.int32), 0)
                at += JOINED
            tl.store(out + key.to(tl.int64) * W + column, sums.to(out.dtype.element_ty), mask=within)
