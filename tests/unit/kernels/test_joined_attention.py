"""Attention of a joined tensor is that of its three parts, and its gradient is one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.kernels import varlen_attention as room
from paceline.kernels.torch_attention import flash_joined
from paceline.kernels.varlen_attention import varlen_attention, varlen_attention_joined

BOUNDS = [0, 3, 50, 57, 57]


def joined(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """A tensor [57, 3, 2, 32], the bounds of its sequences, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(57, 3, 2, 32, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn(57, 2, 32, generator=generator).to(device, dtype)
    return qkv, torch.tensor(BOUNDS, dtype=torch.int32, device=device), grad


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_output_and_gradient_are_those_of_the_parts(dropout: float, window: int | None, scale: float | None) -> None:
    qkv, bounds, grad = joined()
    settings = {"dropout": dropout, "window": window, "scale": scale}
    torch.manual_seed(1)
    out = varlen_attention_joined(qkv, bounds, 47, **settings)
    torch.manual_seed(1)
    expected = varlen_attention(*qkv.unbind(1), bounds, 47, **settings)
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(each, qkv, grad)[0] for each in (out, expected)))


def test_a_last_dimension_with_a_stride_is_no_obstacle() -> None:
    qkv, bounds, _ = joined()
    turned = qkv.transpose(1, 3).contiguous().transpose(1, 3)
    assert turned.stride(-1) != 1, "the test lost its point"
    assert torch.equal(varlen_attention_joined(turned, bounds, 47), varlen_attention_joined(qkv, bounds, 47))


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("short", ["short_attention_joined", "short_attention_joined_backward"]),
        ("flash", ["flash_varlen_joined", "flash_varlen_joined_backward"]),
    ],
)
def test_the_gpus_operators_give_one_gradient(operator: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler sees: nothing between the operators and whoever takes the gradient."""
    monkeypatch.setattr(room, "operator_for", lambda *_: operator)

    def step(qkv: Tensor, bounds: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = varlen_attention_joined(qkv, bounds, 47, dropout=0.1, scale=0.2)
        return out, *torch.autograd.grad(out, qkv, grad)

    traced = make_fx(step, tracing_mode="symbolic")(*joined(torch.bfloat16))
    targets = [str(node.target) for node in traced.graph.nodes]
    found = [name.split(".")[1] for name in targets if name.startswith("paceline.")]
    assert found == names
    assert not [name for name in targets if "stack" in name or "cat" in name or "copy" in name], targets
    assert not traced.shape_env.guards, f"the number of positions was fixed: {traced.shape_env.guards}"


def test_flash_attention_has_a_fake_forward_and_backward() -> None:
    """So that plan sees through it, without a GPU."""
    qkv, bounds, _ = joined(torch.bfloat16, "meta")
    qkv.retain_grad()
    out = flash_joined(qkv, bounds, 47, 0.1, 0.125, -1)[0]
    assert (out.shape, out.dtype) == ((57, 2, 32), torch.bfloat16)
    (slope,) = torch.autograd.grad(out, qkv, torch.empty_like(out))
    assert (slope.shape, slope.dtype, slope.is_contiguous()) == (qkv.shape, torch.bfloat16, True)
