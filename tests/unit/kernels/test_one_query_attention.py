"""Attention of one query a sequence, against the definition, sequence after sequence.

The kernels themselves run here only under ``TRITON_INTERPRET=1`` (slow, fp16, no GPU needed); tests/gpu runs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.kernels import one_query_attention as room
from paceline.kernels import short_attention
from paceline.kernels.one_query_attention import one_query_attention, operator_for, padded_one_query
from paceline.machine.facts import Gpu
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import answer, run

HEADS, SIZE = 3, 8
RAGGED = (3, 47, 7, 1)
WITH_EMPTY = (0, 41, 0, 19, 1, 0, 0)
"""At the beginning, in between, and at the end, where the slots of a packed row are that no sample took."""
NOTHING = torch.empty(0, dtype=torch.int32)


def bounds(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def states(
    lengths: Sequence[int], dtype: torch.dtype = torch.float64, heads: int = HEADS, size: int = SIZE
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [P, H, D], keys and values [T, 2, H, D], and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (len(lengths), heads, size), (sum(lengths), 2, heads, size), (len(lengths), heads, size)
    q, kv, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q.requires_grad_(), kv.requires_grad_(), grad


def reference(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, draws: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """The definition, in the precision of its arguments; ``draws`` [H, T] are those the forward operator returned."""
    parts = []
    for query, (begin, end) in zip(q, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        keys, values = kv[begin:end].unbind(1)
        scores = torch.einsum("hd,jhd->hj", query, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
        probabilities = scores.softmax(-1)
        if dropout > 0:
            kept = draws[:, begin:end].long() + 2**31 >= round(dropout * 2**32)
            probabilities = probabilities * kept / (1 - dropout)
        parts.append(torch.einsum("hj,jhd->hd", probabilities, values))
    return torch.stack(parts)


def relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


# ---- what it computes, in plain torch


@pytest.fixture(params=["loop", "padded"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "operator_for", lambda q: request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("lengths", [RAGGED, WITH_EMPTY, (57,), (1, 1)], ids=["ragged", "empty", "one", "single"])
@pytest.mark.parametrize("longest", [None, 64, 2**40])  # which takes no more memory than the row is long
@pytest.mark.parametrize("scale", [None, 0.7, -0.3])
def test_output_and_gradients_are_those_of_each_sequence_alone(
    lengths: tuple[int, ...], longest: int | None, scale: float | None
) -> None:
    q, kv, grad = states(lengths)
    wanted = reference(q, kv, bounds(lengths), NOTHING, scale=scale)
    out = one_query_attention(q, kv, bounds(lengths), longest or max(lengths), scale=scale)
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    slopes = torch.autograd.grad(wanted, (q, kv), grad)
    for name, one, other in zip(("q", "kv"), torch.autograd.grad(out, (q, kv), grad), slopes, strict=True):
        assert one.is_contiguous(), f"the gradient of {name} should be one contiguous tensor"
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=lambda text, n=name: f"gradient of {n}: {text}")


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_empty_sequence_is_exactly_zero(dropout: float) -> None:
    q, kv, grad = states(WITH_EMPTY)
    empty = torch.tensor(WITH_EMPTY) == 0
    out = one_query_attention(q, kv, bounds(WITH_EMPTY), 64, dropout=dropout)
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    spoilt = kv.detach().clone()
    spoilt[40] = math.inf  # before the second of them
    infinite = one_query_attention(q, spoilt, bounds(WITH_EMPTY), 64, dropout=dropout)
    (slope,) = torch.autograd.grad(infinite, q, grad)
    assert not infinite[empty].any(), "what is infinite in another sequence shows"
    assert not slope[empty].any(), "what is infinite in another sequence shows in the gradient of its query"
    assert torch.equal(out[empty], torch.zeros_like(out[empty])), "its output is not 0"
    assert torch.equal(dq[empty], torch.zeros_like(out[empty])), "its query has a gradient"
    assert out[~empty].any(), "the others are 0 too"
    assert dkv.isfinite().all(), "keys or values have a gradient that is not finite"


@pytest.mark.usefixtures("_way")
def test_states_of_any_strides() -> None:
    """Keys and values are views of one product; a query may be a row of a larger one; a last dimension be strided."""
    q, kv, grad = states(RAGGED)
    wanted = one_query_attention(q, kv, bounds(RAGGED), 64)
    slopes = torch.autograd.grad(wanted, (q, kv), grad)
    plain = q.detach(), kv.detach()
    layouts = {
        "parts of larger ones": [torch.cat([t, t], -2)[..., HEADS:, :] for t in plain],
        "heads first": [t.transpose(0, -2).contiguous().transpose(0, -2) for t in plain],
        "a strided last dimension": [t.transpose(0, -1).contiguous().transpose(0, -1) for t in plain],
    }
    for name, views in layouts.items():
        assert not any(view.is_contiguous() for view in views), "the test lost its point"
        for view in views:
            view.requires_grad_()
        out = one_query_attention(*views, bounds(RAGGED), 64)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12, msg=name)
        for one, other in zip(torch.autograd.grad(out, views, grad), slopes, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("queries", "positions", "longest"), [(3, 0, 5), (0, 0, 5), (3, 0, 0), (0, 4, 4), (2, 4, 0)])
def test_nothing_to_attend_to_is_zero(queries: int, positions: int, longest: int, dropout: float) -> None:
    q = torch.full((queries, 2, 4), math.nan, requires_grad=True)
    kv = torch.full((positions, 2, 2, 4), math.nan, requires_grad=True)
    out = one_query_attention(q, kv, torch.zeros(queries + 1, dtype=torch.int32), longest, dropout=dropout)
    assert torch.equal(out, torch.zeros(queries, 2, 4))
    dq, dkv = torch.autograd.grad(out, (q, kv), torch.ones_like(out))
    assert torch.equal(dq, torch.zeros_like(q)), "the queries have a gradient"
    assert torch.equal(dkv, torch.zeros_like(kv)), "the keys and values have a gradient"


@pytest.mark.usefixtures("_way")
def test_positions_of_no_sequence_have_no_gradient() -> None:
    q, kv, grad = states((3, 47, 7))
    out = one_query_attention(q[:2], kv, bounds((3, 47)), 64)
    (slope,) = torch.autograd.grad(out, kv, grad[:2])
    assert torch.equal(slope[50:], torch.zeros(7, 2, HEADS, SIZE))
    assert slope[:50].all(), "and the others should have one"


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_one_sequence_stays_there(bad: float) -> None:
    """Padding must not read a neighbour: zero times infinity is not zero."""
    q, kv, grad = states(RAGGED)
    spoilt = kv.detach().clone()
    spoilt[-1] = bad
    found = []
    for rows in (kv, spoilt.requires_grad_()):
        out = one_query_attention(q, rows, bounds(RAGGED), 64)
        found.append((out, *torch.autograd.grad(out, (q, rows), grad)))
    assert not found[1][0][-1].isfinite().all(), "the test lost its point"
    for clean, other in zip(*found, strict=True):
        assert torch.equal(other[:-1], clean[:-1]), "it spread to another sequence"


# narrow formats add up in fp32 and round once; fp32 has nothing wider, and each CPU adds up in an order of its own
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 8)])
@pytest.mark.parametrize("dropout", [0.0, 1e-12])  # rounded to none, on the path of dropout
def test_formats_are_right_to_their_rounding(dtype: torch.dtype, roundings: int, dropout: float) -> None:
    q, kv, grad = states(RAGGED, dtype)
    out = one_query_attention(q, kv, bounds(RAGGED), 64, dropout=dropout)
    exact = [t.detach().double().requires_grad_() for t in (q, kv)]
    wanted = reference(*exact, bounds(RAGGED), NOTHING)
    slopes = torch.autograd.grad(wanted, exact, grad.double())
    for name, one, other in zip(
        ("output", "dq", "dkv"), (out, *torch.autograd.grad(out, (q, kv), grad)), (wanted, *slopes), strict=True
    ):
        assert one.dtype == dtype
        off = relative(one, other) / torch.finfo(dtype).eps
        assert off < roundings, f"{name} is off by {off:.1f} roundings"


# ---- dropout, in plain torch


def uniform(lengths: Sequence[int], dropout: float, heads: int = 4) -> tuple[Tensor, Tensor]:
    """Of queries that weigh all keys alike: what multiplies each value, [H, T], as the output shows it and as the
    gradient of the values does. Short of its 1 / N, so that it is 0 or 1 / (1 - dropout)."""
    total, longest = sum(lengths), max(lengths)
    q = torch.zeros(len(lengths), heads, longest, dtype=torch.float64)
    within = torch.cat([torch.arange(length) for length in lengths])
    values = torch.eye(longest, dtype=torch.float64)[within][:, None].expand(total, heads, longest)
    kv = torch.stack([torch.zeros_like(values), values], 1).requires_grad_()
    out = one_query_attention(q, kv, bounds(lengths), longest, dropout=dropout)
    (slope,) = torch.autograd.grad(out, kv, torch.ones_like(out))
    counts = torch.cat([torch.full((length,), length) for length in lengths])
    shown = torch.cat([row[:, :length] for row, length in zip(out.detach(), lengths, strict=True)], 1)
    return shown * counts, slope[:, 1, :, 0].T * counts


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest_both_ways_alike(dropout: float) -> None:
    torch.manual_seed(0)
    forward, backward = uniform((300, 0, 211, 1, 150, 256), dropout)
    torch.testing.assert_close(forward, backward, msg="the backward pass drops others than the forward pass")
    dropped = (forward == 0).double()
    error = math.sqrt(dropout * (1 - dropout) / dropped.numel())
    assert dropped.mean().item() == pytest.approx(dropout, abs=4 * error)
    torch.testing.assert_close(forward[forward > 0], torch.full_like(forward[forward > 0], 1 / (1 - dropout)))


@pytest.mark.usefixtures("_way")
def test_dropout_is_governed_by_the_seed() -> None:
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(uniform((40, 20), 0.3)[0])
    assert torch.equal(drawn[0], drawn[1]), "the same seed drew another mask"
    assert not torch.equal(drawn[0], drawn[2]), "two seeds drew one mask"


@pytest.mark.usefixtures("_way")
def test_the_gradient_with_dropout_is_that_of_the_very_mask_drawn() -> None:
    """Numerically: the same seed draws the same mask, so the function can be probed beside where it stands."""
    q, kv, _ = states((4, 0, 5))

    def seeded(q: Tensor, kv: Tensor) -> Tensor:
        torch.manual_seed(11)
        return one_query_attention(q, kv, bounds((4, 0, 5)), 6, dropout=0.4)

    assert torch.autograd.gradcheck(seeded, (q, kv), atol=1e-6)


# ---- what is chosen, declared and refused


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_one_graph_serves_every_packing_and_number_of_sequences(dropout: float) -> None:
    """Where the sequences are is data, and how many there are may change: nothing is compiled again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, kv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return one_query_attention(q * 2, kv, cu_seqlens, 47, dropout=dropout) + 1

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in (RAGGED, WITH_EMPTY, (20, 13), (9, 8, 7, 6, 5)):  # longer and shorter rows than max_length
        (q, kv, grad), cu_seqlens = states(lengths), bounds(lengths)
        for tensor in (q, kv, cu_seqlens):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.manual_seed(1)
        out = compiled(q, kv, cu_seqlens)
        found = (out, *torch.autograd.grad(out, (q, kv), grad))
        torch.manual_seed(1)
        wanted = padded_one_query(q * 2, kv, cu_seqlens, 47, dropout, SIZE**-0.5) + 1
        for one, other in zip(found, (wanted, *torch.autograd.grad(wanted, (q, kv), grad)), strict=True):
            torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    assert counter.frame_count == 1, f"it was compiled {counter.frame_count} times"


def test_a_graph_traced_for_a_gpu_holds_both_operators_and_nothing_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "operator_for", lambda q: "kernel")

    def step(q: Tensor, kv: Tensor, cu_seqlens: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = one_query_attention(q, kv, cu_seqlens, 512, dropout=0.1, scale=0.2)
        return out, *torch.autograd.grad(out, (q, kv), grad)

    q, kv, grad = states((60, 30, 12), torch.bfloat16, 2, 32)
    traced = make_fx(step, tracing_mode="symbolic")(q, kv, bounds((60, 30, 12)), grad)
    called = [str(node.target).removeprefix("paceline.") for node in traced.graph.nodes if node.op == "call_function"]
    wanted = ["one_query_attention.default", "one_query_attention_backward.default"]
    assert [name for name in called if not name.startswith(("_operator", "aten.detach", "<built-in"))] == wanted
    assert not traced.shape_env.guards, f"a number was fixed: {traced.shape_env.guards}"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fakes_are_contiguous_whatever_the_strides_of_the_arguments(dropout: float) -> None:
    with FakeTensorMode():
        q = torch.empty(4, 9, 64, dtype=torch.float16).transpose(0, 1)
        kv = torch.empty(2, 70, 4, 64, dtype=torch.float16).transpose(0, 1)
        cu_seqlens = torch.empty(10, dtype=torch.int32)
        out, exact, log_sums, draws = torch.ops.paceline.one_query_attention(q, kv, cu_seqlens, dropout, 0.125)
        found = torch.ops.paceline.one_query_attention_backward(
            out, q, kv, exact, log_sums, draws, cu_seqlens, dropout, 0.125
        )
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert (exact.shape, exact.dtype) == (q.shape, torch.float32)
    assert (log_sums.shape, log_sums.dtype) == ((9, 4), torch.float32), "one log sum a sequence and head"
    assert (draws.shape, draws.dtype) == ((4, 70 if dropout else 0), torch.int32), (
        "drawn exactly where there is dropout"
    )
    for gradient, part in zip(found, (q, kv), strict=True):
        assert (gradient.shape, gradient.dtype, gradient.is_contiguous()) == (part.shape, part.dtype, True)


def test_the_kernel_is_taken_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = torch.empty(4, 2, 64, dtype=torch.bfloat16)
    assert operator_for(on_cpu) == "loop", "the kernel on a CPU"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert operator_for(on_cpu) == "padded", "a compiler has no lengths"
    assert operator_for(torch.empty(4, 2, 64, dtype=torch.bfloat16, device="meta")) == "padded"
    monkeypatch.setattr(short_attention, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        good = torch.empty(4, 2, 64, dtype=torch.bfloat16, device="cuda")
        for size, dtype, name in (
            *((size, dtype, "kernel") for size in (32, 64, 128) for dtype in (torch.bfloat16, torch.float16)),
            (64, torch.float32, "padded"),
            (80, torch.bfloat16, "padded"),
        ):
            assert operator_for(good.new_empty((4, 2, size), dtype=dtype)) == name, f"{dtype}, heads of {size}"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert operator_for(good) == "padded", "the kernel on a GPU of compute capability 7.5"


def test_a_plan_goes_the_way_of_the_gpu(tmp_path: Path) -> None:
    """On the device that stands in for a GPU, forward and backward, in a process of its own."""
    assert run(__name__, cache=tmp_path) == {
        "torch.bfloat16, heads of 64": ["kernel", "planned", [9, 4, 64], True, [70, 2, 4, 64], True],
        "torch.bfloat16, heads of 80": ["padded", "planned", [9, 4, 80], True, [70, 2, 4, 80], True],
        "torch.float32, heads of 64": ["padded", "planned", [9, 4, 64], True, [70, 2, 4, 64], True],
    }


def planned() -> dict[str, list[object]]:
    """Operator, device, and shapes of the gradients, contiguous or not."""
    found: dict[str, list[object]] = {}
    with stand_in(Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))) as (device, _):
        for dtype, size in ((torch.bfloat16, 64), (torch.bfloat16, 80), (torch.float32, 64)):
            q = torch.empty(9, 4, size, dtype=dtype, device=device, requires_grad=True)
            kv = torch.empty(70, 2, 4, size, dtype=dtype, device=device, requires_grad=True)
            cu_seqlens = torch.empty(10, dtype=torch.int32, device=device)
            out = one_query_attention(q, kv, cu_seqlens, 512, dropout=0.1)
            dq, dkv = torch.autograd.grad(out, (q, kv), torch.empty_like(out))
            seen = [(list(slope.shape), slope.is_contiguous()) for slope in (dq, dkv)]
            found[f"{dtype}, heads of {size}"] = [operator_for(q), out.device.type, *seen[0], *seen[1]]
    return found


REFUSED = {
    "queries of another head size": ({"q": torch.zeros(2, 2, 16)}, r"\[P, H, D\] and \[T, 2, H, D\].*\(2, 2, 16\)"),
    "queries of the whole row": ({"q": torch.zeros(1, 2, 2, 32)}, r"\[P, H, D\]"),
    "three parts": ({"kv": torch.zeros(6, 3, 2, 32)}, r"\(6, 3, 2, 32\)"),
    "keys alone": ({"kv": torch.zeros(6, 2, 32)}, r"\[T, 2, H, D\]"),
    "another type": ({"kv": torch.zeros(6, 2, 2, 32, dtype=torch.float64)}, "one type.*float32.*float64"),
    "bounds of another number": ({"cu_seqlens": bounds((6,))}, r"int32 \[P \+ 1\] for the 2 queries.*\(2,\)"),
    "bounds of another type": ({"cu_seqlens": bounds((4, 2)).long()}, "int32.*int64"),
    "all dropped": ({"dropout": 1.0}, r"dropout should be in \[0, 1\), and is 1.0"),
    "less than none": ({"dropout": -0.1}, "dropout"),
}


@pytest.mark.parametrize("operator", ["padded", "kernel"])
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case: str, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "operator_for", lambda q: operator)
    changed, message = REFUSED[case]
    fitting = {"q": torch.zeros(2, 2, 32), "kv": torch.zeros(6, 2, 2, 32), "cu_seqlens": bounds((4, 2)), "dropout": 0.0}
    with pytest.raises(ValueError, match=message):
        one_query_attention(max_length=4, **{**fitting, **changed})


def test_the_operator_refuses_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HAS_TRITON", True)
    q, kv, _ = states(RAGGED, torch.float16, 2, 32)
    turned = kv.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="last dimension"):
        torch.ops.paceline.one_query_attention(q, turned, bounds(RAGGED), 0.0, 1.0)


def test_without_triton_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HAS_TRITON", False)
    q, kv, _ = states(RAGGED, torch.float16, 2, 32)
    with pytest.raises(RuntimeError, match="needs Triton"):
        torch.ops.paceline.one_query_attention(q, kv, bounds(RAGGED), 0.0, 1.0)


# ---- what the kernels compute


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
NAMES = ("output", "dq", "dkv")


def differentiated(
    q: Tensor, kv: Tensor, grad: Tensor, lengths: Sequence[int], dropout: float, scale: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and gradients of the kernels, and of the definition with the numbers that they drew, in fp64."""
    cu_seqlens = bounds(lengths, q.device.type)
    out, _, _, draws = torch.ops.paceline.one_query_attention(q, kv, cu_seqlens, dropout, scale)
    found = (out, *torch.autograd.grad(out, (q, kv), grad))
    exact = [part.detach().double().requires_grad_() for part in (q, kv)]
    wanted = reference(*exact, cu_seqlens, draws, dropout, scale)
    return found, (wanted, *torch.autograd.grad(wanted, exact, grad.double()))


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_kernels_compute_the_definition(dropout: float, dim: int) -> None:
    lengths = (130, 0, 64, 33, 1, 0)  # more tiles than one, whole ones, and less
    q, kv, grad = states(lengths, torch.float16, 2, dim)
    found, wanted = differentiated(q, kv, grad, lengths, dropout, dim**-0.5)
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert one.is_contiguous(), f"{name} should be contiguous"
        assert relative(one, other) < 1e-3, f"{name} is off by {relative(one, other):.1e}"
    for name, one in zip(NAMES[:2], found, strict=False):
        assert not one[[1, 5]].any(), f"{name} of an empty sequence is not 0"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_the_kernels_read_any_strides() -> None:
    q, kv, grad = states((70, 5), torch.float16, 2, 64)
    wanted, _ = differentiated(q, kv, grad, (70, 5), 0.0, 0.125)
    turned = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    within = torch.cat([kv, kv, kv], 2).detach()[:, :, 2:4].requires_grad_()
    assert not within.is_contiguous(), "the test lost its point"
    for one, other in zip(differentiated(turned, within, grad, (70, 5), 0.0, 0.125)[0], wanted, strict=True):
        assert torch.equal(one, other), "views are read wrongly"
    for constant in (grad[:1, :1].expand_as(grad), grad[:, :, :1].expand_as(grad)):
        found, wanted = (differentiated(q, kv, each, (70, 5), 0.0, 0.125)[0] for each in (constant, constant.clone()))
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other), "an expanded gradient is read wrongly"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_far_from_zero_cost_neither_range_nor_precision(sign: int) -> None:
    """Far below zero a missing key, whose score is 0, would take all the probability; far above, sums are infinite.

    And what all keys have in common cancels out of the gradient of the query only as well as the scores' add up to 0.
    """
    q, kv, grad = states((20, 70), torch.float16, 1, 32)
    q = (q.detach() / 8 + 30).requires_grad_()
    kv = (kv.detach() + sign * torch.tensor([30.0, 0.0])[None, :, None, None]).half().requires_grad_()
    found, wanted = differentiated(q, kv, grad, (20, 70), 0.0, 0.2)
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert one.isfinite().all(), f"{name} is not finite"
        assert relative(one, other) < 5e-3, f"{name} is off by {relative(one, other):.1e}"


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_nothing_to_attend_to_is_zero_for_the_kernels_too() -> None:
    q, kv, grad = states((0, 0), torch.float16, 2, 32)
    out = torch.ops.paceline.one_query_attention(q, kv, bounds((0, 0)), 0.1, 1.0)[0]
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    assert not out.any()
    assert not dq.any()
    assert dkv.shape == kv.shape


@interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_operators_keep_the_rules_of_custom_operators(dropout: float) -> None:
    q, kv, _ = states((12, 0, 8), torch.float16, 2, 32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (q, kv, bounds((12, 0, 8)), dropout, 0.2)
    torch.library.opcheck(torch.ops.paceline.one_query_attention.default, arguments, test_utils=checks)


if __name__ == "__main__":
    answer(planned())
