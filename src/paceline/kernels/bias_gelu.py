"""``gelu(x + bias)`` in one pass over memory forward, and one backward that adds up the bias's gradient on its way.

The exact GELU, by the error function. On a fast GPU the kernels that others make of it are bound by the error
function's forty instructions rather than by memory. Here it takes a dozen: 1 - erf(z) = p(t) * exp(-z * z) with t =
1 / (1 + 0.3275911 z), |error| at most 1.5e-7 (Abramowitz and Stegun, 7.1.26), far below a rounding of bf16; and the
backward pass needs the same exponential for the density. The lower tail is taken as it is, not as 1 minus something.

Shapes: T positions (all leading dimensions together), N width.
Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernels are Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, runs_kernels
from paceline.kernels.residual_norm import processors

FORWARD: Final = {"rows": 4, "columns": 1024, "warps": 4}
"""A tile, and its warps."""
BACKWARD: Final = {"rows": 8, "columns": 512, "warps": 4, "programs": 4, "stages": 1}
"""The same, and programs a multiprocessor, each of which leaves partial sums of its columns; tiles in flight."""


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """The exact GELU of ``x + bias``, computed in fp32. Differentiable once.

    Args:
        x: [..., N] bf16 or fp16: a matrix product without its bias.
        bias: fp32 [N].

    Returns:
        Shape and type of ``x``.

    Raises:
        ValueError: shapes or number formats are not these.
    """
    out: Tensor = torch.ops.paceline.bias_gelu(x, bias)
    return out


@torch.library.custom_op("paceline::bias_gelu", mutates_args=())
def _forward(x: Tensor, bias: Tensor) -> Tensor:
    if x.dtype not in (torch.bfloat16, torch.float16) or x.ndim < 1 or not x.shape[-1]:
        raise ValueError(f"x should be bf16 or fp16 [..., N], and is {x.dtype} {tuple(x.shape)}")
    if bias.dtype != torch.float32 or bias.shape != x.shape[-1:]:
        raise ValueError(f"bias should be fp32 {tuple(x.shape[-1:])}, and is {bias.dtype} {tuple(bias.shape)}")
    x, bias = x.contiguous(), bias.contiguous()
    if not runs_kernels(x):
        return F.gelu(x.float() + bias).to(x.dtype)
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    with torch.cuda.device_of(x):
        launch(
            _bias_gelu_kernel, (-(-rows // FORWARD["rows"]), -(-width // FORWARD["columns"])),
            x, bias, out, rows, N=width, R=FORWARD["rows"], C=FORWARD["columns"], num_warps=FORWARD["warps"],
        )  # fmt: skip
    return out


@torch.library.custom_op("paceline::bias_gelu_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and of ``bias``."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    if not runs_kernels(x):
        d = torch.ops.aten.gelu_backward(grad.float(), x.float() + bias)
        return d.to(x.dtype), d.reshape(-1, x.shape[-1]).sum(0)
    dx, width = torch.empty_like(x), x.shape[-1]
    rows, across = x.numel() // width, -(-width // BACKWARD["columns"])
    down = min(-(-rows // BACKWARD["rows"]), -(-BACKWARD["programs"] * processors(x.device) // across))
    partial = bias.new_empty((down, width))
    with torch.cuda.device_of(x):
        launch(
            _bias_gelu_backward_kernel, (across, down),
            *(grad, x, bias, dx, partial, rows),
            N=width, R=BACKWARD["rows"], C=BACKWARD["columns"], STAGES=BACKWARD["stages"], num_warps=BACKWARD["warps"],
        )  # fmt: skip
    return dx, partial.sum(0)


@_forward.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, dbias = torch.ops.paceline.bias_gelu_backward(grad, *ctx.saved_tensors)
    return dx, dbias


_forward.register_autograd(_differentiate, setup_context=_save)

OPERATOR: Final = torch.ops.paceline.bias_gelu.default
"""What stands for it in a graph."""


if HAS_TRITON:
    import triton
    import triton.language as tl

    _jit = triton.jit(do_not_specialize=("rows",))

    @triton.jit
    def _distribution(x):
        """The share of the standard normal distribution below x, and exp(-x * x / 2)."""
        z = tl.abs(x) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * z)
        bell = tl.exp2(x * x * -0.7213475204444817)
        upper = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        tail = 0.5 * upper * bell
        return tl.where(x < 0.0, tail, 1.0 - tail), bell

    @_jit
    def _bias_gelu_kernel(x, bias, out, rows, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
        row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
        column = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
        inside = (row < rows) & (column < N)
        at = row * N + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(bias + column, mask=column < N, other=0.0)
        below, _ = _distribution(value)
        tl.store(out + at, (value * below).to(out.dtype.element_ty), mask=inside)

    @_jit
    def _bias_gelu_backward_kernel(
        grad, x, bias, dx, partial, rows,
        N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """A program: every n-th tile of its columns."""
        column = (tl.program_id(0) * C + tl.arange(0, C))[None, :]
        within = column < N
        biases = tl.load(bias + column, mask=within, other=0.0)
        sums = tl.zeros((R, C), tl.float32)
        for first in tl.range(tl.program_id(1) * R, rows, tl.num_programs(1) * R, num_stages=STAGES):
            row = (first + tl.arange(0, R)).to(tl.int64)[:, None]
            inside = (row < rows) & within
            at = row * N + column
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + biases
            below, bell = _distribution(value)
            slope = below + value * bell * 0.3989422804014327
            d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * slope
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
            sums += d
        tl.store(partial + tl.program_id(1) * N + column, tl.sum(sums, 0)[None, :], mask=within)
