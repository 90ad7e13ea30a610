"""AdamW's kernel beside the formula in fp64.

On a CPU the operator is torch's own. The kernel runs here only under ``TRITON_INTERPRET=1`` (no GPU needed), by the
same test; tests/gpu runs it on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.adamw import LARGE, adamw_

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

NEAR = 1e-6
"""Share of all that weights have moved: what fp32 rounds away. With 1 - 0.999 taken in fp32 it is 7e-6, and
more with 1 - 0.999^t, by a GPU's exp2."""

RATE, BETA1, BETA2, EPS, DECAY, SCALE = 1e-3, 0.9, 0.999, 1e-8, 0.01, 4.0


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, decoupled: bool) -> None:
    """One update in fp64, in place: Loshchilov and Hutter 2019, algorithm 2."""
    rate = torch.tensor(RATE).double()  # as fp32 has it
    g = g / SCALE + (0 if decoupled else DECAY) * p
    if decoupled:
        p -= rate * DECAY * p
    m += (1 - BETA1) * (g - m)
    v += (1 - BETA2) * (g * g - v)
    p -= rate * (m / (1 - BETA1**step)) / ((v / (1 - BETA2**step)).sqrt() + EPS)


def follow_the_formula(count: int, decoupled: bool, device: str) -> None:
    """Twenty updates of one buffer, one of them skipped; weights begin at 0, so that they are what was updated."""
    generator = torch.Generator(device).manual_seed(count)
    weights, gradient, mean, square = ours = [torch.zeros(count, device=device) for _ in range(4)]
    theirs = [tensor.double() for tensor in ours]
    rate, scale = (torch.full((), value, device=device) for value in (RATE, SCALE))
    step = 0
    for index in range(20):
        skipped, before = index == 7, weights.clone()
        step += not skipped
        gradient.copy_(torch.randn(count, device=device, generator=generator))
        given = gradient.double()
        scalars = [torch.full((), float(value), device=device) for value in (step, skipped)]
        adamw_(*([tensor] for tensor in ours), scalars[0], rate, scale, scalars[1], BETA1, BETA2, EPS, DECAY, decoupled)
        if skipped:
            assert torch.equal(before, weights)
            continue
        adam(theirs[0], given, theirs[2], theirs[3], step, decoupled)
        for name, one, other in (("weights", weights, theirs[0]), ("mean", mean, theirs[2]), ("v", square, theirs[3])):
            away = float((one.double() - other).norm() / other.norm())
            assert away < NEAR, f"{name} after update {step}: {away:.1e}"


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_follows_the_formula(decoupled: bool) -> None:
    follow_the_formula(LARGE + 17, decoupled, "cpu")
