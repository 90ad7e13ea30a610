"""SGD's kernel beside torch's fused operator.

On a CPU the operator is torch's own. The kernel runs here only under ``TRITON_INTERPRET=1`` (no GPU needed), by the
same test; tests/gpu runs it on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.adamw import LARGE
from paceline.kernels.sgd import sgd_

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def follow_torchs_sgd(count: int, momentum: float, nesterov: bool, device: str) -> None:
    """Twenty updates of one buffer, one of them skipped."""
    generator = torch.Generator(device).manual_seed(count)
    ours = [torch.randn(count, device=device, generator=generator), *(torch.zeros(count, device=device) for _ in "gm")]
    theirs = [tensor.clone() for tensor in ours]
    rate, scale = (torch.full((), value, device=device) for value in (0.05, 4.0))
    for index in range(20):
        gradient = torch.randn(count, device=device, generator=generator)
        overflow = torch.full((), float(index == 7), device=device)
        for state in (ours, theirs):
            state[1].copy_(gradient)
        momenta = [ours[2]] if momentum else []
        sgd_([ours[0]], [ours[1]], momenta, rate, scale, overflow, momentum, 0.01, nesterov)
        torch._fused_sgd_(
            [theirs[0]], [theirs[1]], [theirs[2]] if momentum else [], lr=rate, momentum=momentum, weight_decay=0.01,
            dampening=0.0, nesterov=nesterov, maximize=False, is_first_step=False, grad_scale=scale, found_inf=overflow,
        )  # fmt: skip
    for one, other in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert ours[2].any() == bool(momentum)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_it_follows_torchs(momentum: float, nesterov: bool) -> None:
    follow_torchs_sgd(LARGE + 17, momentum, nesterov, "cpu")
