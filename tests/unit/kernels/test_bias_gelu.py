"""GELU of product and bias: what it declares and what it computes.

On a CPU the operators are made of torch's own. The kernels run here only under ``TRITON_INTERPRET=1`` (slow, fp16, no
GPU needed), by the same tests; tests/gpu runs them on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.kernels.bias_gelu import bias_gelu
from tests.unit.kernels.test_residual_norm import EXACT, interpreted, relative

pytestmark = [
    # of Triton's interpreter, and of numbers beyond a row's end that are computed and not stored
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NAMES = ("output", "dx", "dbias")


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, device: str = "cpu") -> list[Tensor]:
    """x, bias and the gradient of the result."""
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda size: torch.randn(size, generator=generator, device=device)  # noqa: E731
    return [(2 * draw(shape)).to(dtype), draw(shape[-1:]), draw(shape).to(dtype)]


def differentiated(x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [part.detach().requires_grad_() for part in (x, bias)]
    out = bias_gelu(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def exact(x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """In fp64."""
    leaves = [part.detach().double().requires_grad_() for part in (x, bias)]
    out = F.gelu(leaves[0] + leaves[1])
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def assert_near(parts: list[Tensor]) -> None:
    rounding = torch.finfo(parts[0].dtype).eps
    for name, found, wanted in zip(NAMES, differentiated(*parts), exact(*parts), strict=True):
        allowed = EXACT[found.device.type] if name == "dbias" else rounding
        assert found.isfinite().all(), f"{name} is not finite"
        assert relative(found, wanted) < allowed, f"{name} is off by {relative(found, wanted):.1e}"


@pytest.mark.parametrize("shape", [(1, 37, 64), (3, 5, 100), (2, 1100), (1, 1, 16), (7,)])
def test_results_and_gradients_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    assert_near(made(shape))


@pytest.mark.skipif(interpreted() is None, reason="the interpreter knows no bf16")
def test_in_bf16_too() -> None:
    assert_near(made((2, 9, 48), torch.bfloat16))


def test_every_number_has_its_own_value_and_slope_even_far_out() -> None:
    """Both tails, where the value is small and 1 minus something would cancel."""
    x = torch.linspace(-12, 12, 2401).half()
    parts = [x, torch.zeros(2401), torch.ones(2401, dtype=torch.float16)]
    for name, found, wanted in zip(NAMES[:2], differentiated(*parts), exact(*parts), strict=False):
        error = (found.double() - wanted).abs()
        # a half rounding of fp16, and what the polynomial, or torch's own, is off by
        allowed = wanted.abs() * 2**-11 * 1.1 + 2e-6
        worst = int((error - allowed).argmax())
        assert (error <= allowed).all(), f"{name} at {float(x[worst])} is off by {float(error[worst]):.1e}"


def test_strides_do_not_matter() -> None:
    parts = made((4, 6, 24))
    spread = [torch.stack((part, part + 1), -1)[..., 0] for part in parts]
    assert not any(part.is_contiguous() for part in spread), "the test lost its point"
    for name, one, other in zip(NAMES, differentiated(*parts), differentiated(*spread), strict=True):
        assert torch.equal(one, other), f"{name} differs"


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: int) -> None:
    *leaves, grad = made((5, 32))
    whole = differentiated(*leaves, grad)[1:]
    own = [leaf.clone().requires_grad_(index != frozen) for index, leaf in enumerate(leaves)]
    bias_gelu(*own).backward(grad)
    assert own[frozen].grad is None
    assert torch.equal(own[1 - frozen].grad, whole[1 - frozen])


def test_no_position_at_all_is_legal() -> None:
    out, dx, dbias = differentiated(*made((2, 0, 8)))
    assert out.shape == dx.shape == (2, 0, 8)
    assert torch.equal(dbias, torch.zeros(8))


def test_it_is_differentiated_once() -> None:
    x, bias, grad = made((5, 32))
    (slope,) = torch.autograd.grad(bias_gelu(x.requires_grad_(), bias), x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="bias_gelu_backward"):
        slope.sum().backward()


def test_the_operators_keep_the_rules_of_custom_operators() -> None:
    x, bias, grad = made((2, 6, 24))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.paceline.bias_gelu.default, (x.requires_grad_(), bias.requires_grad_()), test_utils=checks
    )
    arguments = (grad, x.detach(), bias.detach())
    torch.library.opcheck(torch.ops.paceline.bias_gelu_backward.default, arguments, test_utils=(checks[0], checks[2]))


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_shapes_are_known_without_data(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 5, 24, dtype=torch.bfloat16, device="meta" if device == "meta" else "cpu").transpose(0, 1)
        leaves = [x.requires_grad_(), x.new_empty(24, dtype=torch.float32).requires_grad_()]
        out = bias_gelu(*leaves)
        gradients = torch.autograd.grad(out, leaves, out)
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, torch.bfloat16, True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(4, 8), torch.zeros(8), "x should be bf16 or fp16"),
        (torch.zeros(4, 0).half(), torch.zeros(0), "x should be bf16 or fp16"),
        (torch.zeros(4, 8).half(), torch.zeros(9), "bias should be fp32"),
        (torch.zeros(4, 8).half(), torch.zeros(8).half(), "bias should be fp32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x: Tensor, bias: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bias_gelu(x, bias)
