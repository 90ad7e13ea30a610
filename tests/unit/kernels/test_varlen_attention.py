"""Varlen attention against plain attention of each sequence by itself."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from paceline.kernels import sequence_attention, torch_attention, varlen_attention
from paceline.kernels.varlen_attention import operator_for, padded_attention
from tests.testing.marks import slow_except

HEADS, SIZE = 3, 8
PLAIN = [0, 3, 50, 57]
WITH_EMPTY = [0, 41, 41, 60, 61, 61, 61]
LONG = [0, 700, 701, 1400]  # longer than a block of the fused kernels
attend = varlen_attention.varlen_attention


def states(bounds: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """q, k, v and a gradient, [T, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(bounds[-1], HEADS, SIZE, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [t.to(dtype).requires_grad_(index < 3) for index, t in enumerate(made)]


def cu(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def longest(bounds: list[int]) -> int:
    return max(end - first for first, end in itertools.pairwise(bounds))


def one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float | None, window: int | None) -> Tensor:
    """The definition: softmax of the products, sequence after sequence."""
    parts = []
    for first, end in itertools.pairwise(bounds):
        rows = [t[first:end].transpose(0, 1) for t in (q, k, v)]
        at = torch.arange(end - first)
        near = None if window is None else (at[:, None] - at).abs() <= window
        parts.append(F.scaled_dot_product_attention(*rows, attn_mask=near, scale=scale).transpose(0, 1))
    return torch.cat(parts)


TINY = 1e-9
"""Dropout that is rounded to none, but takes the path of dropout."""


@pytest.mark.parametrize("bounds", [PLAIN, WITH_EMPTY, LONG], ids=["plain", "empty", "long"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_output_and_gradients_are_those_of_each_sequence_alone(
    bounds: list[int], window: int | None, scale: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v, grad = states(bounds, dtype)
    expected = one_by_one(q, k, v, bounds, scale, window)
    slopes = torch.autograd.grad(expected, (q, k, v), grad)
    for function, dropout in ((attend, 0.0), (attend, TINY), (padded_attention, 0.0)):
        case = f"{function.__name__}, dropout {dropout}"
        out = function(q, k, v, cu(bounds), longest(bounds), dropout=dropout, scale=scale, window=window)
        assert out.shape == q.shape, case
        assert (out - expected).abs().max() <= tolerance, case
        found = torch.autograd.grad(out, (q, k, v), grad)
        for name, one, other in zip("qkv", found, slopes, strict=True):
            assert (one - other).abs().max() <= tolerance, f"{case}, gradient of {name}"


@pytest.mark.parametrize("dropout", [0.0, TINY])
def test_states_of_any_strides(dropout: float) -> None:
    """Fused query, key and value are views of one tensor; a last dimension may be strided too."""
    fused = torch.randn(57, 3, HEADS, SIZE, requires_grad=True)
    expected = one_by_one(*(fused.unbind(1)), PLAIN, None, None)
    (slope,) = torch.autograd.grad(expected.square().sum(), fused)
    out = attend(*fused.unbind(1), cu(PLAIN), 47, dropout=dropout)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), fused)[0], slope, rtol=0, atol=1e-4)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in fused.unbind(1)]
    torch.testing.assert_close(attend(*turned, cu(PLAIN), 47, dropout=dropout), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dropout", [0.0, TINY])
def test_positions_of_no_sequence_are_written(dropout: float) -> None:
    q, k, v, grad = states(PLAIN)
    out = attend(q, k, v, cu([0, 3, 50]), 47, dropout=dropout)
    assert torch.equal(out[50:], torch.zeros(7, HEADS, SIZE))
    assert all(torch.equal(g[50:], torch.zeros(7, HEADS, SIZE)) for g in torch.autograd.grad(out, (q, k, v), grad))


def test_half_precision_with_dropout_is_computed_in_full() -> None:
    q, k, v, _ = states(PLAIN, torch.bfloat16)
    out = attend(q, k, v, cu(PLAIN), 47, dropout=TINY)
    assert out.dtype == torch.bfloat16
    exact = one_by_one(q.float(), k.float(), v.float(), PLAIN, None, None)
    assert torch.equal(out, exact.bfloat16()) or (out - exact).abs().max() < 0.02


def dropped_share(q: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """With equal keys every probability is 1 / N, and with a one-hot V the output shows each of them: [N, H, N]."""
    count = q.shape[0]
    values = torch.eye(count)[:, None].expand(count, HEADS, count).contiguous()
    zeros = torch.zeros(count, HEADS, count)
    out = attend(zeros, zeros, values, cu([0, count]), count, dropout=dropout) * count
    return out, (out == 0).float()


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest(dropout: float) -> None:
    torch.manual_seed(0)
    weights, dropped = dropped_share(torch.empty(200), dropout)
    error = math.sqrt(dropout * (1 - dropout) / dropped.numel())
    assert dropped.mean().item() == pytest.approx(dropout, abs=4 * error)
    assert weights.max().item() == pytest.approx(1 / (1 - dropout), rel=1e-4)
    assert weights[weights > 0].min().item() == pytest.approx(1 / (1 - dropout), rel=1e-4)
    assert weights.mean().item() == pytest.approx(1, abs=4 * error / (1 - dropout))
    # no head, query or key is favoured: means over the others stay within their errors
    for dim, others in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):
        shares = dropped.mean(others)
        assert (shares - dropout).abs().max() < 5 * error * math.sqrt(dropped.shape[dim])
    neighbours = torch.corrcoef(torch.stack([dropped[..., :-1].flatten(), dropped[..., 1:].flatten()]))[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(dropped.numel()), "neighbouring draws hang together"


def test_all_dropped_is_zero_and_finite() -> None:
    q, k, v, grad = states(PLAIN)
    out = attend(q, k, v, cu(PLAIN), 47, dropout=1.0)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out, (q, k, v), grad))


def test_dropout_repeats_with_its_seed() -> None:
    q, k, v, _ = states(PLAIN)
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(attend(q, k, v, cu(PLAIN), 47, dropout=0.2))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("window", slow_except([-1, 3], 3))
def test_the_gradient_with_dropout_is_that_of_the_very_mask_drawn(window: int) -> None:
    """Numerically: the same seed draws the same mask, so the function can be probed beside where it stands."""
    bounds = [0, 4, 4, 9]
    q, k, v, _ = states(bounds, torch.float64)

    def seeded(*states: Tensor) -> Tensor:
        torch.manual_seed(11)
        return sequence_attention.sequence_attention(*states, cu(bounds), 5, 0.4, 0.5, window)

    assert torch.autograd.gradcheck(seeded, (q, k, v), atol=1e-6, check_undefined_grad=False)


def test_a_second_backward_pass_gives_the_same() -> None:
    """What is kept for it is not written over."""
    q, k, v, grad = states(PLAIN)
    out = attend(q, k, v, cu(PLAIN), 47, dropout=0.3)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, (q, k, v), grad), strict=True))


def test_torch_accepts_the_operators() -> None:
    """Schema, autograd registration and fake implementation agree with what the operators do."""
    q, k, v, _ = states(PLAIN)
    torch.library.opcheck(sequence_attention._fused, (q, k, v, cu(PLAIN), 0.3, -1))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(sequence_attention._dropped, (q, k, v, cu(PLAIN), 47, 0.1, 0.3, 5), test_utils=checks)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_one_graph_serves_every_packing_and_length(dropout: float) -> None:
    """Where the sequences are is data, and the number of positions may change: nothing is compiled again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return attend(q * 2, k, v, bounds, 47, dropout=dropout) + 1

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for bounds in (PLAIN, [0, 20, 40, 57], [0, 10, 20, 33], [0, 40, 60, 81]):
        q, k, v, grad = states(bounds)
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 0)
        torch.manual_seed(1)
        out = compiled(q, k, v, cu(bounds))
        found = torch.autograd.grad(out, (q, k, v), grad)
        torch.manual_seed(1)
        expected = layer(q, k, v, cu(bounds))
        assert torch.equal(out, expected)
        for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "size", "window", "dropout", "name"),
    [
        (torch.bfloat16, 64, None, 0.1, "flash"),
        (torch.float16, 64, 8, 0.1, "flash"),
        (torch.bfloat16, 30, None, 0.1, "padded"),
        (torch.bfloat16, 320, None, 0.0, "efficient"),
        (torch.float32, 64, None, 0.0, "efficient"),
        (torch.float32, 64, None, 0.1, "padded"),
        (torch.float32, 64, 8, 0.0, "padded"),
        (torch.float64, 64, None, 0.0, "padded"),
    ],
)
def test_the_operator_on_a_gpu(
    dtype: torch.dtype, size: int, window: int | None, dropout: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen_attention, "PREFER_SHORT", False)
    with FakeTensorMode():
        q = torch.empty(10, 2, size, dtype=dtype, device="cuda")
    assert operator_for(q, 512, dropout, window) == name


def test_older_gpus_do_without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (7, 5))
    monkeypatch.setattr(varlen_attention, "PREFER_SHORT", False)
    with FakeTensorMode():
        q = torch.empty(10, 2, 64, dtype=torch.float16, device="cuda")
    assert operator_for(q, 512, 0.0, None) == "efficient"


def test_the_operator_elsewhere() -> None:
    assert operator_for(torch.empty(4, 2, 8), 4, 0.1, None) == "loop"
    assert operator_for(torch.empty(4, 2, 8, device="meta"), 4, 0.1, None) == "padded"


@pytest.mark.parametrize(
    ("operator", "settings"),
    [("flash", (50, 0.1, 0.125, -1)), ("efficient", (50, 0.1, 0.125))],
)
def test_the_gpus_operators_have_a_fake_forward_and_backward(operator: str, settings: tuple[object, ...]) -> None:
    """So that compile and plan see through them, without a GPU."""
    q, k, v = (torch.empty(100, 4, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = getattr(torch_attention, operator)(q, k, v, torch.empty(5, device="meta", dtype=torch.int32), *settings)[0]
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    out.sum().backward()
    assert (q.grad.shape, v.grad.dtype) == (q.shape, q.dtype)
