"""LayerNorm of residual and dropped sum: what it declares, the law of its dropout, and what it computes.

On a CPU the operators are made of torch's own. The kernels run here only under ``TRITON_INTERPRET=1`` (slow, fp16, no
GPU needed), by the same tests; tests/gpu runs them on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.kernels import residual_norm as room
from paceline.kernels.residual_norm import WIDEST, residual_norm

pytestmark = [
    # of Triton's interpreter, and of numbers beyond a row's end that are computed and not stored
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

WORD = 2**32
EPS = 1e-5
EXACT = {"cpu": 2e-6, "cuda": 1e-5}
"""What sums in fp32 may be off by; a GPU's roots and exponentials are approximate."""
NAMES = ("output", "narrow output", "dx", "dbias", "dresidual", "dweight", "dshift")


def interpreted() -> str | None:
    """Why the kernels cannot be interpreted here."""
    if not room.HAS_TRITON:
        return "Triton is not installed"
    from triton import knobs

    if not knobs.runtime.interpret:
        return "set TRITON_INTERPRET=1 to interpret the kernels"
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "Triton 3.6's interpreter needs NumPy below 2.4"
    return None


interpreter = pytest.mark.skipif(interpreted() is not None, reason=str(interpreted()))


def made(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float16, seed: int = 0, device: str = "cpu"
) -> list[Tensor]:
    """x, bias, residual, weight and shift, and the gradients of both results."""
    generator = torch.Generator(device).manual_seed(seed)
    width = shape[-1:]
    draw = lambda size: torch.randn(size, generator=generator, device=device)  # noqa: E731
    x, bias, residual = draw(shape).to(dtype), draw(width), draw(shape)
    return [x, bias, residual, 1 + draw(width) / 4, draw(width) / 4, draw(shape), draw(shape).to(dtype)]


def kept(keys: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """The mask of dropout, from the keys that the forward operator returned: rows' first, then columns'."""
    rows = len(keys) - shape[-1]
    wide = keys.to(torch.int64)
    # two signed 32-bit numbers: their product fits 64 bits, and its low 32 bits are right
    products = (wide[:rows, None] * wide[None, rows:]).to(torch.int32).to(torch.int64)
    return (products + WORD // 2 >= round(dropout * WORD)).view(shape)


def reference(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, keys: Tensor, dropout: float
) -> Tensor:
    """The definition, in the precision of its arguments."""
    value = x + bias
    if dropout > 0:
        value = value * kept(keys, x.shape, dropout) / (1 - dropout)
    return F.layer_norm(residual + value, x.shape[-1:], weight, shift, EPS)


def both(parts: list[Tensor], dropout: float, narrow: bool = True) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results and gradients of the operator, and those of the definition in fp64 with the same keys."""
    *leaves, grad, grad_narrow = parts
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out, out_narrow, _, keys = torch.ops.paceline.residual_norm(*leaves, dropout, EPS, narrow)
    outputs, grads = ((out, out_narrow), (grad, grad_narrow)) if narrow else ((out,), (grad,))
    found = (*outputs, *torch.autograd.grad(outputs, leaves, grads))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = reference(*exact, keys, dropout)
    total = grad.double() + (grad_narrow.double() if narrow else 0.0)
    return found, (*(wanted for _ in outputs), *torch.autograd.grad(wanted, exact, total))


def relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def assert_near(parts: list[Tensor], dropout: float, narrow: bool = True) -> None:
    # the results in x's format are off by its rounding, the others by fp32's
    rounding = torch.finfo(parts[0].dtype).eps
    names = NAMES if narrow else tuple(name for name in NAMES if name != "narrow output")
    for name, found, wanted in zip(names, *both(parts, dropout, narrow), strict=True):
        allowed = rounding if name in ("narrow output", "dx") else EXACT[found.device.type]
        assert found.isfinite().all(), f"{name} is not finite"
        assert relative(found, wanted) < allowed, f"{name} is off by {relative(found, wanted):.1e}"


# ---- what it computes


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.99])
@pytest.mark.parametrize("shape", [(1, 37, 64), (3, 5, 100), (2, 768), (1, 1, 16), (7,)])
def test_results_and_gradients_are_those_of_the_definition(shape: tuple[int, ...], dropout: float) -> None:
    assert_near(made(shape), dropout)
    assert_near(made(shape), dropout, narrow=False)


@pytest.mark.skipif(interpreted() is None, reason="the interpreter knows no bf16")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_in_bf16_too(dropout: float) -> None:
    assert_near(made((2, 9, 48), torch.bfloat16), dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_strides_do_not_matter(dropout: float) -> None:
    parts = made((4, 6, 24))
    spread = [torch.stack((part, part + 1), -1)[..., 0] for part in parts]
    spread[0] = parts[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(part.is_contiguous() for part in spread), "the test lost its point"
    found = []
    for each in (parts, spread):
        torch.manual_seed(1)
        found.append(both(each, dropout)[0])
    for name, one, other in zip(NAMES, *found, strict=True):
        assert torch.equal(one, other), f"{name} differs"


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_may_come_back_to_one_result_alone(which: int) -> None:
    *leaves, grad, grad_narrow = made((5, 32))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    outputs = residual_norm(*leaves, dropout=0.0, eps=EPS, narrow=True)
    found = torch.autograd.grad(outputs[which], leaves, (grad, grad_narrow)[which])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted_out = reference(*exact, torch.empty(0), 0.0)
    wanted = torch.autograd.grad(wanted_out, exact, (grad, grad_narrow)[which].double())
    for name, one, other in zip(NAMES[2:], found, wanted, strict=True):
        assert relative(one, other) < 1e-3, f"{name} is off by {relative(one, other):.1e}"


@pytest.mark.parametrize("frozen", range(5))
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: int) -> None:
    *leaves, grad, grad_narrow = made((5, 32))
    gradients = []
    for skipped in (None, frozen):
        own = [leaf.clone().requires_grad_(index != skipped) for index, leaf in enumerate(leaves)]
        out = residual_norm(*own, dropout=0.0, eps=EPS, narrow=True)
        torch.autograd.backward(out, (grad, grad_narrow))
        gradients.append([leaf.grad for leaf in own])
    for index, (one, other) in enumerate(zip(*gradients, strict=True)):
        if index == frozen:
            assert other is None, f"{NAMES[2 + index]} was computed for a frozen tensor"
        else:
            assert torch.equal(one, other), f"{NAMES[2 + index]} is another"


def test_no_position_at_all_is_legal() -> None:
    for dropout in (0.0, 0.5):
        leaves = [leaf.requires_grad_() for leaf in made((2, 0, 8))[:5]]
        out, narrow = residual_norm(*leaves, dropout=dropout, eps=EPS, narrow=True)
        assert out.shape == narrow.shape == (2, 0, 8)
        gradients = torch.autograd.grad((out, narrow), leaves, (out, narrow))
        assert all(not gradient.any() for gradient in gradients), "a sum of nothing is not zero"


def test_a_row_far_from_zero_keeps_its_digits() -> None:
    """Mean of squares minus square of means would cancel."""
    parts = made((3, 64))
    parts[2] = parts[2] + 3000.0
    for name, found, wanted in zip(NAMES, *both(parts, 0.0), strict=True):
        assert relative(found, wanted) < 2e-3, f"{name} is off by {relative(found, wanted):.1e}"


def test_autocast_around_it_changes_nothing() -> None:
    parts = made((2, 9, 48), torch.bfloat16)
    plain, _ = both(parts, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = both(parts, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_it_is_differentiated_once() -> None:
    *leaves, grad, _ = made((5, 32))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, _ = residual_norm(*leaves, dropout=0.0, eps=EPS, narrow=False)
    (slope,) = torch.autograd.grad(out, leaves[2], grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="residual_norm_backward"):
        slope.sum().backward()


# ---- the law of its dropout


def standardised(seed: int, dropout: float, size: int = 512) -> Tensor:
    """Dropped or not, with mean 0 and variance 1 if elements are dropped as often as they should be."""
    torch.manual_seed(seed)
    shape = torch.Size((size, size))
    zeros, ones = torch.zeros(shape, dtype=torch.float16), torch.ones(size)
    _, _, _, keys = torch.ops.paceline.residual_norm(zeros, ones, zeros.float(), ones, ones, dropout, EPS, False)
    dropped = ~kept(keys, shape, dropout)
    return (dropped.float() - dropout) / (dropout * (1 - dropout)) ** 0.5


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.5, 0.9, 0.99])
def test_elements_are_dropped_as_often_as_asked(dropout: float) -> None:
    deviations = float(standardised(3, dropout).mean()) * 512
    assert abs(deviations) < 4.5, f"the share of dropped elements is {deviations:.1f} standard deviations off"


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_rows_and_columns_are_dropped_independently(axis: str) -> None:
    sample = standardised(5, 0.1)
    sample = sample if axis == "rows" else sample.T
    # inner products of two rows, in standard deviations. Their mean square is 1 only if rectangles, two rows by two
    # columns, are independent as well
    products = sample @ sample.T / 512**0.5
    pairs = products[*torch.triu_indices(512, 512, 1)]
    assert abs(float(pairs.square().mean()) - 1) < 0.05, f"the mean square is {float(pairs.square().mean()):.3f}"
    assert abs(float(pairs.mean())) < 0.03, f"{axis} are correlated by {float(pairs.mean()):.3f} on average"
    assert float(pairs.abs().max()) < 8, f"two {axis} are alike: {float(pairs.abs().max()):.1f} standard deviations"


def test_calls_and_layers_are_dropped_independently() -> None:
    sample = torch.stack([standardised(seed, 0.1, 128).flatten() for seed in range(24)])
    pairs = (sample @ sample.T / 128)[*torch.triu_indices(24, 24, 1)]
    assert float(pairs.abs().max()) < 5, f"two calls are alike: {float(pairs.abs().max()):.1f} standard deviations"


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    torch.manual_seed(0)
    x, bias, residual, weight, shift, *_ = made((64, 256))
    keys = torch.ops.paceline.residual_norm(x, bias, residual, weight, shift, 0.25, EPS, False)[3]
    total, _ = room._plain_sum(x.float() * 0 + 2, bias * 0, residual * 0, keys, 0.25)
    assert set(total.unique().tolist()) == {0.0, float(torch.tensor(2.0) / 0.75)}
    assert float(total.mean()) == pytest.approx(2, abs=0.05)


def test_the_same_seed_drops_the_same() -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(both(made((9, 40)), 0.3)[0])
        state = torch.get_rng_state()
        both(made((9, 40)), 0.0)
        assert torch.equal(state, torch.get_rng_state()), "without dropout random numbers are drawn all the same"
    for name, first, again, other in zip(NAMES, *runs, strict=True):
        assert torch.equal(first, again), f"{name} differs between two runs from one seed"
        if name != "dshift":  # a sum of what comes back
            assert not torch.equal(first, other), f"{name} is the same from two seeds"


# ---- what it declares


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_operators_keep_the_rules_of_custom_operators(dropout: float) -> None:
    *leaves, grad, grad_narrow = made((2, 6, 24))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.paceline.residual_norm
    for narrow in (True, False):
        arguments = (*(leaf.requires_grad_() for leaf in leaves), dropout, EPS, narrow)
        torch.library.opcheck(operator.default, arguments, test_utils=checks)
        _, _, moments, keys = operator(*arguments)
        saved = [part.detach() for part in (*leaves[:4], moments, keys)]
        for grads in ((grad, grad_narrow), (grad, None), (None, grad_narrow)):
            backward = torch.ops.paceline.residual_norm_backward.default
            torch.library.opcheck(backward, (*grads, *saved, dropout), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_shapes_are_known_without_data(device: str, dropout: float) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 5, 24, dtype=torch.bfloat16, device="meta" if device == "meta" else "cpu").transpose(0, 1)
        wide, residual = x.new_empty(24, dtype=torch.float32), x.new_empty(x.shape, dtype=torch.float32)
        leaves = [part.requires_grad_() for part in (x, wide, residual, wide, wide)]
        out, narrow = residual_norm(*leaves, dropout=dropout, eps=EPS, narrow=True)
        gradients = torch.autograd.grad((out, narrow), leaves[:3], (out, narrow))
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, torch.float32, True)
    assert (narrow.shape, narrow.dtype, narrow.is_contiguous()) == (x.shape, torch.bfloat16, True)
    for leaf, gradient in zip(leaves, gradients, strict=False):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


def test_a_graph_traced_with_any_number_of_positions_holds_both_operators() -> None:
    def step(*parts: Tensor) -> tuple[Any, ...]:
        out, narrow = residual_norm(*parts[:5], dropout=0.1, eps=EPS, narrow=True)
        return out, *torch.autograd.grad((out, narrow), parts[:5], parts[5:])

    parts = made((30, 24))
    for leaf in parts[:5]:
        leaf.requires_grad_()
    traced = make_fx(step, tracing_mode="symbolic")(*parts)
    called = [str(node.target) for node in traced.graph.nodes]
    assert called.count("paceline.residual_norm.default") == 1, called
    assert called.count("paceline.residual_norm_backward.default") == 1, called
    positions = str(next(iter(traced.graph.nodes)).meta["val"].shape[0])
    assert positions.startswith("s"), f"the number of positions was fixed: {positions}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(4, 8)}, "x should be bf16 or fp16"),
        ({0: torch.zeros(4, WIDEST + 1, dtype=torch.float16)}, f"1 to {WIDEST} wide"),
        ({1: torch.zeros(9)}, "bias should be fp32"),
        ({2: torch.zeros(3, 8)}, "residual should be fp32"),
        ({2: torch.zeros(4, 8, dtype=torch.float16)}, "residual should be fp32"),
        ({3: torch.zeros(8).double()}, "weight should be fp32"),
        ({5: 1.0}, "dropout should be in"),
        ({5: -0.1}, "dropout should be in"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[int, Any], message: str) -> None:
    arguments = {**dict(enumerate([*made((4, 8))[:5], 0.1])), **change}
    *parts, dropout = arguments.values()
    with pytest.raises(ValueError, match=message):
        residual_norm(*parts, dropout=dropout, eps=EPS, narrow=True)
