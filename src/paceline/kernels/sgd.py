"""SGD, with or without momentum, as one operator on whatever tensors it is given, gated and scaled on the device.

As ``kernels/adamw.py``: large flat buffers on a GPU go to a kernel of our own, everything else to
``torch._fused_sgd_``, whose arithmetic the kernel follows. Momentum begins with the first gradient, which is what zeros
before it make of it.

Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013 (Nesterov's).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.adamw import BLOCK, is_large
from paceline.kernels.launch import HAS_TRITON, launch

MUTATED = ("parameters", "gradients", "momenta")


@torch.library.custom_op("paceline::sgd_", mutates_args=MUTATED)
def sgd_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    lr: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """One update of every parameter, in place; the lists run in parallel, with the same shapes and strides.

    Args:
        parameters: weights, on one device.
        gradients: divided by ``grad_scale``; undefined afterwards.
        momenta: zeros before the first update; none if ``momentum`` is 0.
        lr: fp32 scalar on the device.
        grad_scale: fp32 scalar on the device.
        found_inf: fp32 scalar on the device; 1: nothing is changed at all.
        weight_decay: times the weight is added to the gradient.
    """
    columns = (parameters, gradients, momenta) if momentum else (parameters, gradients)
    rows = list(zip(*columns, strict=True))
    large = [row for row in rows if is_large(row)]
    for row in large:
        count = row[0].numel()
        with torch.cuda.device_of(row[0]):
            launch(
                descend,
                (-(-count // BLOCK),),
                # without momentum the kernel is given the weights in its place, and does not look at them
                *(row[0], row[1], row[2 if momentum else 0], lr, grad_scale, found_inf, count, momentum, weight_decay),
                MOMENTUM=momentum != 0,
                NESTEROV=nesterov,
                BLOCK=BLOCK,
                num_warps=8,
            )
    if len(large) == len(rows):
        return
    others = [list(column) for column in zip(*(row for row in rows if not is_large(row)), strict=True)]
    torch._fused_sgd_(
        others[0],
        others[1],
        others[2] if momentum else [],
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


@sgd_.register_fake
def _(*_: object) -> None:
    return None


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def descend(
        parameter,
        gradient,
        buffer,
        lr,
        grad_scale,
        found_inf,
        count,
        momentum,
        weight_decay,
        MOMENTUM: tl.constexpr,
        NESTEROV: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        if tl.load(found_inf) == 0.0:
            at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            g = tl.load(gradient + at, mask=inside, other=0.0) / tl.load(grad_scale)
            p = tl.load(parameter + at, mask=inside, other=0.0)
            g += weight_decay * p
            if MOMENTUM:
                m = momentum * tl.load(buffer + at, mask=inside, other=0.0) + g
                tl.store(buffer + at, m, mask=inside)
                if NESTEROV:
                    g += momentum * m
                else:
                    g = m
            tl.store(parameter + at, p - tl.load(lr) * g, mask=inside)
