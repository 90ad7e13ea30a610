"""Attention over a packed row: what it declares, the law of its dropout, and, interpreted, what it computes.

The kernels themselves run here only under ``TRITON_INTERPRET=1`` (slow, fp16, no GPU needed); tests/gpu runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.kernels import short_attention as room
from paceline.kernels.short_attention import short_attention, short_attention_joined, supports

WORD = 2**32


def head_factor(head: int) -> int:
    """MurmurHash3's finaliser of the head's number, made odd."""
    x = (head + 1) * 0x9E3779B1 % WORD
    x = (x ^ (x >> 16)) * 0x85EBCA6B % WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % WORD
    return (x ^ (x >> 16)) | 1


def kept(keys: Tensor, begin: int, end: int, heads: int, dropout: float) -> Tensor:
    """The mask of dropout [H, L, L] of positions ``begin:end``, from the keys that the forward operator returned."""
    query_keys, key_keys = keys[:, begin:end].to(torch.int64)
    # two signed 32-bit numbers at a time: their product fits 64 bits, and its low 32 bits are right
    products = (query_keys[:, None] * key_keys[None, :]).to(torch.int32).to(torch.int64)
    factors = torch.tensor([head_factor(head) for head in range(heads)], device=keys.device)
    factors = factors.to(torch.int32).to(torch.int64)
    products = (products * factors[:, None, None]).to(torch.int32)
    return products.to(torch.int64) + WORD // 2 >= round(dropout * WORD)


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, keys: Tensor, dropout: float, scale: float
) -> Tensor:
    """The definition, a sequence at a time, in the precision of its arguments [T, H, D]."""
    parts = []
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        scores = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end]) * scale
        probabilities = scores.softmax(-1)
        if dropout > 0:
            probabilities = probabilities * kept(keys, begin, end, q.shape[1], dropout) / (1 - dropout)
        parts.append(torch.einsum("hij,jhd->ihd", probabilities, v[begin:end]))
    return torch.cat(parts)


def bounds(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


# ---- what it declares


def test_a_graph_traced_with_any_number_of_positions_holds_both_operators() -> None:
    def step(q: Tensor, cu_seqlens: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = short_attention(q, q, q, cu_seqlens, 512, dropout=0.1, scale=0.2)
        return out, *torch.autograd.grad(out, q, grad)

    q = torch.randn(90, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    traced = make_fx(step, tracing_mode="symbolic")(q, bounds([60, 30]), torch.randn(90, 2, 32, dtype=torch.bfloat16))
    called = [str(node.target) for node in traced.graph.nodes]
    assert called.count("paceline.short_attention.default") == 1, called
    assert called.count("paceline.short_attention_backward.default") == 1, called
    assert not traced.shape_env.guards, f"the number of positions was fixed: {traced.shape_env.guards}"


def test_the_gradient_of_a_joined_tensor_is_written_by_one_operator() -> None:
    def step(qkv: Tensor, cu_seqlens: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = short_attention_joined(qkv, cu_seqlens, 512, dropout=0.1, scale=0.2)
        return out, *torch.autograd.grad(out, qkv, grad)

    qkv = torch.randn(90, 3, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    traced = make_fx(step, tracing_mode="symbolic")(qkv, bounds([60, 30]), torch.randn(90, 2, 32).bfloat16())
    called = [str(node.target).removeprefix("paceline.") for node in traced.graph.nodes if node.op == "call_function"]
    wanted = ["short_attention_joined.default", "short_attention_joined_backward.default"]
    assert [name for name in called if not name.startswith(("_operator", "aten.detach", "<built-in"))] == wanted
    assert not traced.shape_env.guards, f"the number of positions was fixed: {traced.shape_env.guards}"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fakes_of_a_joined_tensor_are_contiguous_whatever_its_strides(dropout: float) -> None:
    with FakeTensorMode():
        qkv = torch.empty(3, 70, 4, 64, dtype=torch.float16).transpose(0, 1)
        arguments = (qkv, torch.empty(9, dtype=torch.int32), 512, dropout, 0.125)
        out, log_sums, keys = torch.ops.paceline.short_attention_joined(*arguments)
        found = torch.ops.paceline.short_attention_joined_backward(
            out, qkv, out, log_sums, arguments[1], keys, 512, dropout, 0.125
        )
    assert (out.shape, out.is_contiguous()) == ((70, 4, 64), True)
    assert (log_sums.shape, log_sums.dtype) == ((4, 70), torch.float32), "one log sum a head and position"
    assert (found.shape, found.is_contiguous()) == (qkv.shape, True)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fakes_are_contiguous_whatever_the_strides_of_the_arguments(dropout: float) -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(70, 3, 4, 64, dtype=torch.float16).unbind(1)
        arguments = (q, k, v, torch.empty(9, dtype=torch.int32), 512)
        out, log_sums, keys = torch.ops.paceline.short_attention(*arguments, dropout, 0.125)
        gradients = torch.ops.paceline.short_attention_backward(
            out, q, k, v, out, log_sums, arguments[3], keys, 512, dropout, 0.125
        )
    assert out.shape == q.shape, "the output has the shape of the queries"
    assert out.is_contiguous(), "the output should be contiguous"
    assert (log_sums.shape, log_sums.dtype) == ((4, 70), torch.float32), "one log sum a head and position"
    assert (keys.shape[1] > 70) if dropout else (keys.numel() == 0), "keys are drawn exactly where there is dropout"
    for gradient in gradients:
        assert gradient.shape == q.shape, "a gradient has the shape of its tensor"
        assert gradient.is_contiguous(), "a gradient should be contiguous"


def test_supports_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HAS_TRITON", True)
    assert "on cpu" in (supports(torch.empty(4, 2, 64, dtype=torch.bfloat16), 512) or ""), "a CPU was accepted"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    with FakeTensorMode():
        good = torch.empty(4, 2, 64, dtype=torch.bfloat16, device="cuda")
        assert supports(good, 512) is None, "it refused what it is made for"
        refused = {
            "bf16 or fp16": supports(good.new_empty(4, 2, 64, dtype=torch.float32), 512),
            "head dimension is 80": supports(good.new_empty(4, 2, 80), 512),
            "2048 long": supports(good, 2048),
            "should be [positions": supports(good.new_empty(2, 64), 512),
            "not contiguous": supports(good.new_empty_strided((4, 2, 64), (1, 4, 8)), 512),
        }
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        refused["7.5"] = supports(good, 512)
    monkeypatch.setattr(room, "HAS_TRITON", False)
    refused["Triton is not installed"] = supports(good, 512)
    for part, reason in refused.items():
        assert part in (reason or ""), f"expected a reason with {part!r}, found {reason!r}"


def test_arguments_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HAS_TRITON", True)
    q = torch.zeros(6, 2, 32, dtype=torch.float16)
    cu_seqlens = bounds([6])
    with pytest.raises(ValueError, match="of one shape and type"):
        short_attention(q, q[:3], q, cu_seqlens, 8)
    with pytest.raises(ValueError, match="head dimension is 16"):
        short_attention(q[..., :16], q[..., :16], q[..., :16], cu_seqlens, 8)
    with pytest.raises(ValueError, match="last dimension"):
        short_attention(q, q.transpose(0, 2).contiguous().transpose(0, 2), q, cu_seqlens, 8)
    with pytest.raises(ValueError, match="int32"):
        short_attention(q, q, q, cu_seqlens.long(), 8)
    with pytest.raises(ValueError, match="dropout"):
        short_attention(q, q, q, cu_seqlens, 8, dropout=1.0)
    with pytest.raises(ValueError, match="scale"):
        short_attention(q, q, q, cu_seqlens, 8, scale=-1.0)
    with pytest.raises(ValueError, match=r"\[T, 3, H, D\]"):
        short_attention_joined(torch.zeros(3, 6, 2, 32, dtype=torch.float16), cu_seqlens, 8)
    monkeypatch.setattr(room, "HAS_TRITON", False)
    with pytest.raises(RuntimeError, match="needs Triton"):
        short_attention(q, q, q, cu_seqlens, 8)


# ---- the law of its dropout


def standardised(seed: int, heads: int, dropout: float, length: int = 512) -> Tensor:
    """Dropped or not, [H, L, L], with mean 0 and variance 1 if elements are dropped as often as they should be."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31, (2, length), dtype=torch.int32, generator=generator)
    dropped = ~kept(keys, 0, length, heads, dropout)
    return (dropped.float() - dropout) / (dropout * (1 - dropout)) ** 0.5


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.5, 0.9])
def test_elements_are_dropped_as_often_as_asked(dropout: float) -> None:
    sample = standardised(3, 8, dropout)
    deviations = float(sample.mean()) * sample.numel() ** 0.5
    assert abs(deviations) < 4.5, f"the share of dropped elements is {deviations:.1f} standard deviations off"
    for head, deviation in enumerate(sample.mean((1, 2)) * 512):
        assert abs(deviation) < 5, f"in head {head} it is {deviation:.1f} standard deviations off"


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_rows_and_columns_are_dropped_independently(axis: str) -> None:
    sample = standardised(5, 4, 0.1)
    sample = sample if axis == "rows" else sample.transpose(1, 2)
    # inner products of two rows, in standard deviations. Their mean square is 1 only if rectangles, two rows by two
    # columns, are independent as well
    products = sample @ sample.transpose(1, 2) / 512**0.5
    pairs = products[:, *torch.triu_indices(512, 512, 1)]
    assert abs(float(pairs.square().mean()) - 1) < 0.03, f"the mean square is {float(pairs.square().mean()):.3f}"
    assert abs(float(pairs.mean())) < 0.02, f"{axis} are correlated by {float(pairs.mean()):.3f} on average"
    assert float(pairs.abs().max()) < 8, f"two {axis} are alike: {float(pairs.abs().max()):.1f} standard deviations"


def test_heads_and_draws_are_dropped_independently() -> None:
    sample = torch.cat([standardised(7, 32, 0.1), standardised(8, 32, 0.1)]).flatten(1)
    products = sample @ sample.T / sample.shape[1] ** 0.5
    pairs = products[*torch.triu_indices(64, 64, 1)]
    assert abs(float(pairs.square().mean()) - 1) < 0.15, f"the mean square is {float(pairs.square().mean()):.3f}"
    assert float(pairs.abs().max()) < 5.5, f"two heads or draws are alike: {float(pairs.abs().max()):.1f} deviations"


def test_dropout_leaves_the_mean_of_attention_as_it_was() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 40, 2, 32, generator=generator).double().unbind(0)
    cu_seqlens, scale = bounds([40]), 32**-0.5
    whole = reference(q, k, v, cu_seqlens, torch.empty(2, 0, dtype=torch.int32), 0.0, scale)
    draws = [torch.randint(-(2**31), 2**31, (2, 40), dtype=torch.int32, generator=generator) for _ in range(400)]
    dropped = torch.stack([reference(q, k, v, cu_seqlens, keys, 0.2, scale) for keys in draws])
    deviations = (dropped.mean(0) - whole) / (dropped.std(0) / 400**0.5)
    assert abs(float(deviations.square().mean()) - 1) < 0.15, "the mean over draws is not the undropped attention"


# ---- what it computes


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


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dim", [32, 64])
def test_output_and_gradients_are_those_of_the_definition(dropout: float, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = bounds([130, 64, 33, 1, 0, 0])
    qkv = torch.randn(228, 3, 2, dim, generator=generator).half()
    grad = torch.randn(2, 228, dim, generator=generator).half().transpose(0, 1)  # as from [1, H, T, D]
    q, k, v = (part.requires_grad_() for part in qkv.unbind(1))
    out, _, keys = torch.ops.paceline.short_attention(q, k, v, cu_seqlens, 160, dropout, dim**-0.5)
    found = (out, *torch.autograd.grad(out, (q, k, v), grad))
    exact = [part.detach().double().requires_grad_() for part in (q, k, v)]
    wanted_out = reference(*exact, cu_seqlens, keys, dropout, dim**-0.5)
    wanted = (wanted_out, *torch.autograd.grad(wanted_out, exact, grad.double()))
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        assert relative(one, other) < 1e-3, f"{name} is off by {relative(one, other):.1e}"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_joined_and_apart_are_the_same_bits(dropout: float) -> None:
    generator = torch.Generator().manual_seed(3)
    cu_seqlens = bounds([130, 33, 1, 0])
    qkv = torch.randn(164, 3, 2, 32, generator=generator).half().requires_grad_()
    grad = torch.randn(164, 2, 32, generator=generator).half()
    found = []
    for joined in (True, False):
        torch.manual_seed(0)
        if joined:
            out = short_attention_joined(qkv, cu_seqlens, 160, dropout=dropout)
        else:
            out = short_attention(*qkv.unbind(1), cu_seqlens, 160, dropout=dropout)
        found.append((out, *torch.autograd.grad(out, qkv, grad)))
    for name, one, other in zip(("output", "gradient"), *found, strict=True):
        assert torch.equal(one, other), f"{name} is off by {relative(one, other):.1e}"
    assert found[0][1].is_contiguous(), "the gradient should be one contiguous tensor"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows that are computed and not stored
def test_very_negative_scores_do_not_overflow() -> None:
    """The log sum is far below zero, so a missing key, whose score is 0, would have an infinite probability."""
    q = torch.full((20, 1, 32), 8.0).half().requires_grad_()
    k = (-q.detach() + torch.randn(20, 1, 32, generator=torch.Generator().manual_seed(2)) / 8).half().requires_grad_()
    out = short_attention(q, k, k, bounds([20]), 64)
    for name, found in zip(("dq", "dk"), torch.autograd.grad(out.float().sum(), (q, k)), strict=True):
        assert bool(found.isfinite().all()), f"{name} is not finite"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_the_operators_keep_the_rules_of_custom_operators() -> None:
    q, k, v = (torch.randn(20, 2, 32).half().requires_grad_() for _ in range(3))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for dropout in (0.0, 0.3):
        arguments = (q, k, v, bounds([12, 8]), 16, dropout, 0.2)
        torch.library.opcheck(torch.ops.paceline.short_attention.default, arguments, test_utils=checks)
        joined = (torch.stack((q, k, v), 1).detach().requires_grad_(), *arguments[3:])
        torch.library.opcheck(torch.ops.paceline.short_attention_joined.default, joined, test_utils=checks)
