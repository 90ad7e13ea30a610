"""AdamW's kernel beside torch's fused operator.

On a CPU the operator is torch's own. The kernel runs here only under ``TRITON_INTERPRET=1`` (no GPU needed), by the
same test; tests/gpu runs it on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.adamw import LARGE, adamw_

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

NEAR = 1e-6
"""Share of all that weights have moved: what fp32 rounds away. A second moment's correction of 0.001, were it rounded
as 1 - 0.999 is, would be another by 1e-4."""


def follow_torchs_adam(count: int, decoupled: bool, device: str) -> None:
    """Twenty updates of one buffer, one of them skipped; weights begin at 0, so that they are what was updated."""
    generator = torch.Generator(device).manual_seed(count)
    ours = [torch.zeros(count, device=device) for _ in range(4)]
    theirs = [tensor.clone() for tensor in ours]
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    rate, scale = (torch.full((), value, device=device) for value in (1e-3, 4.0))
    step = torch.zeros((), device=device)
    for index in range(20):
        overflow = torch.full((), float(index == 7), device=device)
        step += 1 - overflow
        gradient = torch.randn(count, device=device, generator=generator)
        for state in (ours, theirs):
            state[1].copy_(gradient)
        before = ours[0].clone()
        adamw_(*([tensor] for tensor in ours), step, rate, scale, overflow, 0.9, 0.999, 1e-8, 0.01, decoupled)
        update(
            *([tensor] for tensor in theirs), [], [step], lr=rate, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=scale, found_inf=overflow,
        )  # fmt: skip
        assert torch.equal(before, ours[0]) == bool(overflow), f"update {index + 1}"
        for one, other in zip(ours, theirs, strict=True):
            if one is not ours[1]:  # gradients are undefined afterwards
                away = float((one.double() - other).norm() / other.double().norm())
                assert away < NEAR, f"update {index + 1}"


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_follows_torchs(decoupled: bool) -> None:
    follow_torchs_adam(LARGE + 17, decoupled, "cpu")
