"""The Triton kernels of ``short_attention``; importing them needs Triton.

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

A tile is M queries by N keys. A program finds its sequence's [begin, begin + length) in cu_seqlens and leaves at once
when its tile lies outside. The sequence is the slowest axis of the grid: programs start in the order of the row.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

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
def short_attention_forward(
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
def short_attention_query_gradient(
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
def short_attention_key_gradient(
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
