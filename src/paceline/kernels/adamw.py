"""Adam and AdamW as one operator on whatever tensors it is given, gated and scaled on the device.

Large flat buffers on a GPU go to a kernel of our own, for torch's cuts them into so few blocks that a third of the
memory's rate is lost (0.69 ms against a floor of 0.45 for 67 million weights on an H200). Everything else goes to
``torch._fused_adamw_`` and ``torch._fused_adam_``, whose arithmetic the kernel follows. The operator has a fake
implementation, so that a step can be traced without a device, where ``torch.optim`` would ask the device for the value
of its learning rate.

Source: Kingma and Ba, Adam, ICLR 2015; Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.kernels.launch import HAS_TRITON, launch, runs_kernels

LARGE = 2**16
"""Elements from which a tensor gets a launch of its own."""

BLOCK = 2048
"""Elements a program: 16 bytes a thread from each of four arrays, twice."""

MUTATED = ("parameters", "gradients", "exp_avgs", "exp_avg_sqs")


@torch.library.custom_op("paceline::adamw_", mutates_args=MUTATED)
def adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """One update of every parameter, in place; the lists run in parallel, with the same shapes and strides.

    Args:
        parameters: weights, on one device.
        gradients: multiplied by ``grad_scale``; undefined afterwards.
        exp_avgs: running means of the gradients.
        exp_avg_sqs: running means of their squares.
        step: fp32 scalar on the device: which update this is for the bias corrections, the first being 1.
        lr: fp32 scalar on the device.
        grad_scale: fp32 scalar on the device.
        found_inf: fp32 scalar on the device; 1: nothing is changed at all.
        decoupled: the weights decay apart from the gradient (AdamW); otherwise the decay is added to it (Adam).
    """
    columns = (parameters, gradients, exp_avgs, exp_avg_sqs)
    rows = list(zip(*columns, strict=True))
    large = [row for row in rows if is_large(row)]
    # 1 - 0.999 in fp32 is wrong by 1e-5 of itself
    logs = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))
    numbers = (beta1, beta2, 1 - beta1, 1 - beta2, *logs, eps, weight_decay)
    for row in large:
        count = row[0].numel()
        with torch.cuda.device_of(row[0]):
            launch(
                adam,
                (-(-count // BLOCK),),
                *(*row, step, lr, grad_scale, found_inf, count, *numbers),
                DECOUPLED=decoupled,
                BLOCK=BLOCK,
                num_warps=8,
            )
    if len(large) == len(rows):
        return
    parameters, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*(r for r in rows if not is_large(r)), strict=True))
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


@adamw_.register_fake
def _(*_: object) -> None:
    return None


def is_large(row: tuple[Tensor, ...]) -> bool:
    """Whether a parameter and what belongs to it are for the kernel: fp32, in one piece, on a GPU with triton."""
    return row[0].numel() >= LARGE and all(
        runs_kernels(t) and t.dtype == torch.float32 and t.is_contiguous() for t in row
    )


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def one_minus_exp(x):
        """``1 - exp(x)`` of an ``x`` not above 0; near 0, where the difference cancels, by its series."""
        series = 1.0 + x / 10
        for index in tl.static_range(8):
            series = 1.0 + x / (9 - index) * series
        return tl.where(x > -1.0, -x * series, 1.0 - tl.exp(x))

    @triton.jit
    def adam(
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        step,
        lr,
        grad_scale,
        found_inf,
        count,
        beta1,
        beta2,
        rest1,
        rest2,
        log_beta1,
        log_beta2,
        eps,
        weight_decay,
        DECOUPLED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        if tl.load(found_inf) == 0.0:
            at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            rate, updates = tl.load(lr), tl.load(step)
            g = tl.load(gradient + at, mask=inside, other=0.0) / tl.load(grad_scale)
            p = tl.load(parameter + at, mask=inside, other=0.0)
            m = tl.load(exp_avg + at, mask=inside, other=0.0)
            v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
            if DECOUPLED:
                p -= rate * weight_decay * p
            else:
                g += weight_decay * p
            m += rest1 * (g - m)
            v = beta2 * v + rest2 * g * g
            first, second = one_minus_exp(updates * log_beta1), one_minus_exp(updates * log_beta2)
            p -= rate / first * m / (tl.sqrt(v) / tl.sqrt(second) + eps)
            tl.store(parameter + at, p, mask=inside)
            tl.store(exp_avg + at, m, mask=inside)
            tl.store(exp_avg_sq + at, v, mask=inside)
