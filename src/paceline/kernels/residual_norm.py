"""``LayerNorm(residual + dropout(x + bias))`` in one pass over memory forward, and one backward.

It is how a block of a post-norm encoder (BERT, RoBERTa, DistilBERT, ELECTRA) ends each of its two halves: ``x`` is the
product of the half's last linear layer, ``bias`` that layer's. Under autocast the sum and its norm are fp32, and the
next matrix product wants bf16, so the result comes in both; the two gradients that come back are added on the way.

What a compiler makes of the same lines writes the dropped sum, the mask and the normalised row for the backward pass,
and passes over them again for the sums over positions. Here the backward pass takes the inputs again, which are in
memory anyway, and adds up the gradients of bias, weight and shift on its way: programs walk over rows, and each leaves
one row of partial sums. No atomic additions: the same bits every time.

An element is dropped where the product of two random 32-bit keys, its row's and its column's, is below
``dropout * 2**32``: four instructions where a counter-based generator takes some thirty, as in ``short_attention``.

Shapes: T positions (all leading dimensions together), H width.
Source: Ba, Kiros and Hinton, Layer Normalization, 2016; its gradient as in torch's native_layer_norm_backward.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, runs_kernels, threshold

WIDEST: Final = 4096
"""A row is held in the registers of one program."""
FORWARD: Final = {"elements": 1024, "warps": 4}
"""A program: elements that it holds at a time, so that narrow rows come several at once; warps."""
BACKWARD: Final = {"programs": 8, "elements_a_warp": 256, "stages": 3}
"""Programs a multiprocessor, each of which leaves a row of partial sums; elements a warp; rows in flight."""

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def residual_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor,
    *,
    dropout: float,
    eps: float,
    narrow: bool,
) -> tuple[Tensor, Tensor]:
    """``LayerNorm(residual + dropout(x + bias)) * weight + shift``. Differentiable once, in everything but numbers.

    Args:
        x: [..., H] bf16 or fp16.
        bias, weight, shift: fp32 [H].
        residual: fp32, shape of ``x``.
        dropout: share of the elements of ``x + bias`` that is dropped; random keys come from torch's default generator
            of the device, on the device.
        eps: added to the variance.
        narrow: whether the second result is asked for.

    Returns:
        fp32 [..., H]; the same in ``x``'s type, or an empty tensor.

    Raises:
        ValueError: shapes, number formats or ``dropout`` are not these, or H is above ``WIDEST``.
    """
    found = torch.ops.paceline.residual_norm(x, bias, residual, weight, shift, dropout, eps, narrow)
    return found[0], found[1]


@torch.library.custom_op("paceline::residual_norm", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, dropout: float, eps: float, narrow: bool
) -> Found:
    """Out fp32 and in ``x``'s type; mean and 1 / deviation of each row, fp32 [T, 2]; the keys of dropout, int32
    [T + H] or [0]."""
    _check(x, bias, residual, weight, shift, dropout)
    x, bias, residual, weight, shift = (part.contiguous() for part in (x, bias, residual, weight, shift))
    found = _outputs(x, dropout, narrow)
    out, out_narrow, moments, keys = found
    if dropout > 0:
        keys.random_(-(2**31), 2**31)
    if not runs_kernels(x):
        total, _ = _plain_sum(x, bias, residual, keys, dropout)
        made, mean, inverse = torch.native_layer_norm(total, x.shape[-1:], weight, shift, eps)
        out.copy_(made)
        if narrow:
            out_narrow.copy_(made)
        moments.copy_(torch.stack([mean.flatten(), inverse.flatten()], 1))
        return found
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    together = max(1, FORWARD["elements"] // block)
    with torch.cuda.device_of(x):
        launch(
            _residual_norm_kernel,
            (-(-rows // together),),
            *(x, bias, residual, weight, shift, out, out_narrow, moments, keys, rows),
            *(threshold(dropout), 1 / (1 - dropout), eps),
            H=width, BLOCK=block, R=together, DROPOUT=dropout > 0, NARROW=narrow,
            num_warps=FORWARD["warps"],
        )  # fmt: skip
    return found


@torch.library.custom_op("paceline::residual_norm_backward", mutates_args=())
def _backward(
    grad: Tensor | None,
    grad_narrow: Tensor | None,
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    moments: Tensor,
    keys: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, of ``residual``, and of bias, weight and shift as fp32 [3, H]."""
    x, bias, residual, weight = (part.contiguous() for part in (x, bias, residual, weight))
    if not runs_kernels(x):
        total, kept = _plain_sum(x, bias, residual, keys, dropout)
        given = [g.float() for g in (grad, grad_narrow) if g is not None]
        g = given[0] if len(given) == 1 else given[0] + given[1]
        mean, inverse = (part.contiguous().view(*x.shape[:-1], 1) for part in moments.unbind(1))
        d, dweight, dshift = torch.ops.aten.native_layer_norm_backward(
            g, total, x.shape[-1:], mean, inverse, weight, weight, [True, True, True]
        )
        dx = d if kept is None else d * kept
        return dx.to(x.dtype), d, torch.stack([dx.reshape(-1, x.shape[-1]).sum(0), dweight, dshift])
    dx, dresidual = torch.empty_like(x), torch.empty_like(residual)
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    programs = min(rows, BACKWARD["programs"] * processors(x.device))
    partial = residual.new_empty((programs, 3, width))
    grads = [x if g is None else g.contiguous() for g in (grad, grad_narrow)]
    with torch.cuda.device_of(x):
        launch(
            _residual_norm_backward_kernel,
            (programs,),
            *(*grads, x, bias, residual, weight, moments, keys, dx, dresidual, partial, rows),
            *(threshold(dropout), 1 / (1 - dropout)),
            H=width, BLOCK=block, DROPOUT=dropout > 0, WIDE=grad is not None, NARROW=grad_narrow is not None,
            num_warps=min(16, max(1, block // BACKWARD["elements_a_warp"])), STAGES=BACKWARD["stages"],
        )  # fmt: skip
    return dx, dresidual, partial.sum(0)


@_forward.register_fake
def _(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, dropout: float, eps: float, narrow: bool
) -> Found:
    return _outputs(x, dropout, narrow)


@_backward.register_fake
def _(
    grad: Tensor | None, grad_narrow: Tensor | None, x: Tensor, bias: Tensor, residual: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = residual.new_empty((3, x.shape[-1]))
    return x.new_empty(x.shape), residual.new_empty(residual.shape), sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    x, bias, residual, weight, _, ctx.dropout, _, _ = inputs
    ctx.save_for_backward(x, bias, residual, weight, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_narrow: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad is None and grad_narrow is None:
        return (None,) * 8
    dx, dresidual, sums = torch.ops.paceline.residual_norm_backward(grad, grad_narrow, *ctx.saved_tensors, ctx.dropout)
    return dx, sums[0], dresidual, sums[1], sums[2], None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)

OPERATOR: Final = torch.ops.paceline.residual_norm.default
"""What stands for it in a graph."""


def _check(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, dropout: float) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x should be bf16 or fp16, and is {x.dtype}")
    if x.ndim < 1 or not 1 <= x.shape[-1] <= WIDEST:
        raise ValueError(f"the last dimension of x should be 1 to {WIDEST} wide; x is {tuple(x.shape)}")
    parts = {"bias": bias, "residual": residual, "weight": weight, "shift": shift}
    for name, part in parts.items():
        wanted = x.shape if name == "residual" else x.shape[-1:]
        if part.dtype != torch.float32 or part.shape != wanted:
            raise ValueError(f"{name} should be fp32 {tuple(wanted)}, and is {part.dtype} {tuple(part.shape)}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout should be in [0, 1), and is {dropout}")


def _outputs(x: Tensor, dropout: float, narrow: bool) -> Found:
    width = x.shape[-1]
    rows = x.numel() // width
    return (
        x.new_empty(x.shape, dtype=torch.float32),
        x.new_empty(x.shape if narrow else (0,)),
        x.new_empty((rows, 2), dtype=torch.float32),
        x.new_empty((rows + width if dropout > 0 else 0,), dtype=torch.int32),
    )


def _plain_sum(x: Tensor, bias: Tensor, residual: Tensor, keys: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    """residual + dropout(x + bias), and what was kept, times 1 / (1 - dropout); None: everything."""
    value, kept = x.float() + bias, None
    if dropout > 0:
        rows = x.numel() // x.shape[-1]
        # a product of int32 wraps around, which is what the kernels do
        products = keys[:rows, None] * keys[None, rows:]
        kept = ((products >= threshold(dropout)) / (1 - dropout)).view(x.shape)
        value = value * kept
    return value + residual, kept


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


if HAS_TRITON:
    import triton
    import triton.language as tl

    # numbers that change from call to call: a specialised kernel for each would be compiled in mid-run
    _jit = triton.jit(do_not_specialize=("rows", "threshold"))

    @triton.jit
    def _dropped_sum(
        x, bias, residual, keys, rows, row, column, at, inside, threshold, keep_inverse, DROPOUT: tl.constexpr
    ):  # fmt: skip
        """residual + dropout(x + bias) of a tile, and where it was kept."""
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + bias
        kept = inside
        if DROPOUT:
            row_keys = tl.load(keys + row, mask=row < rows, other=0)
            kept = row_keys * column >= threshold
            value = tl.where(kept, value * keep_inverse, 0.0)
        return value + tl.load(residual + at, mask=inside, other=0.0), kept

    @_jit
    def _residual_norm_kernel(
        x, bias, residual, weight, shift, out, out_narrow, moments, keys, rows, threshold, keep_inverse, eps,
        H: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, DROPOUT: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """A program: R rows."""
        row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        within = column < H
        inside = within & (row < rows)
        at = row * H + column
        column_keys = column
        if DROPOUT:
            column_keys = tl.load(keys + rows + column, mask=within, other=0)
        total, _ = _dropped_sum(
            x, tl.load(bias + column, mask=within, other=0.0), residual, keys, rows, row, column_keys, at, inside,
            threshold, keep_inverse, DROPOUT,
        )  # fmt: skip
        mean = tl.sum(tl.where(inside, total, 0.0), 1)[:, None] / H
        away = tl.where(inside, total - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(away * away, 1)[:, None] / H + eps)
        result = away * inverse * tl.load(weight + column, mask=within, other=0.0)
        result += tl.load(shift + column, mask=within, other=0.0)
        tl.store(out + at, result, mask=inside)
        if NARROW:
            tl.store(out_narrow + at, result.to(out_narrow.dtype.element_ty), mask=inside)
        tl.store(moments + row * 2, mean, mask=row < rows)
        tl.store(moments + row * 2 + 1, inverse, mask=row < rows)

    @_jit
    def _residual_norm_backward_kernel(
        grad, grad_narrow, x, bias, residual, weight, moments, keys, dx, dresidual, partial, rows,
        threshold, keep_inverse,
        H: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """A program: every n-th row, one at a time, and their sums."""
        column = tl.arange(0, BLOCK)
        stride = tl.full((), H, tl.int64)
        within = column < H
        weights = tl.load(weight + column, mask=within, other=0.0)
        biases = tl.load(bias + column, mask=within, other=0.0)
        column_keys = column
        if DROPOUT:
            column_keys = tl.load(keys + rows + column, mask=within, other=0)
        sum_x = tl.zeros((BLOCK,), tl.float32)
        sum_weight = tl.zeros((BLOCK,), tl.float32)
        sum_shift = tl.zeros((BLOCK,), tl.float32)
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            at = row * stride + column
            total, kept = _dropped_sum(
                x, biases, residual, keys, rows, row, column_keys, at, within, threshold, keep_inverse, DROPOUT
            )
            mean = tl.load(moments + row * 2)
            inverse = tl.load(moments + row * 2 + 1)
            normal = tl.where(within, (total - mean) * inverse, 0.0)
            g = tl.zeros((BLOCK,), tl.float32)
            if WIDE:
                g += tl.load(grad + at, mask=within, other=0.0).to(tl.float32)
            if NARROW:
                g += tl.load(grad_narrow + at, mask=within, other=0.0).to(tl.float32)
            weighted = g * weights
            along = tl.sum(weighted * normal, 0) / H
            middle = tl.sum(weighted, 0) / H
            d = (weighted - middle - normal * along) * inverse
            tl.store(dresidual + at, d, mask=within)
            if DROPOUT:
                d = tl.where(kept, d * keep_inverse, 0.0)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=within)
            sum_x += d
            sum_weight += g * normal
            sum_shift += g
        partial += tl.program_id(0) * 3 * H + column
        tl.store(partial, sum_x, mask=within)
        tl.store(partial + H, sum_weight, mask=within)
        tl.store(partial + 2 * H, sum_shift, mask=within)
