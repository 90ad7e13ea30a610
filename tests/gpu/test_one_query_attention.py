"""Attention of one query a sequence on a GPU: right to rounding, exact in what it drops, legal in captured graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels.one_query_attention import one_query_attention, operator_for, padded_one_query
from tests.gpu.waiting import waits_are_errors
from tests.unit.kernels.test_one_query_attention import NAMES, bounds, differentiated, reference, relative

CUDA = torch.device("cuda")
LENGTHS = (512, 511, 385, 0, 300, 273, 129, 128, 127, 65, 64, 63, 33, 32, 31, 17, 2, 1, 0, 0, 0)
"""Whole tiles and one more and one less, and empty sequences between and at the end; 2673 positions."""


@pytest.fixture
def _kernel() -> None:
    if operator_for(torch.empty(1, 1, 64, dtype=torch.bfloat16, device=CUDA)) != "kernel":
        pytest.skip("the kernel cannot run here")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What the allocator hands out next is not a number: a position that is not written shows."""
    blocks = [torch.full((size,), float("nan"), device=CUDA) for size in (1 << 8, 1 << 16, 1 << 20, 1 << 24) * 4]
    del blocks


def row(
    dim: int = 64, heads: int = 3, dtype: torch.dtype = torch.bfloat16, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, Tensor, Tensor]:
    """q [P, H, D], kv [T, 2, H, D] and the output's gradient."""
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = (len(lengths), heads, dim), (sum(lengths), 2, heads, dim), (len(lengths), heads, dim)
    q, kv, grad = (torch.randn(shape, generator=generator, device=CUDA).to(dtype) for shape in shapes)
    return q.requires_grad_(), kv.requires_grad_(), grad


def whole(q: Tensor, kv: Tensor, grad: Tensor, dropout: float, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output and gradients; without ``cu_seqlens`` the lengths are copied to the GPU, which waits."""
    cu_seqlens = bounds(LENGTHS, "cuda") if cu_seqlens is None else cu_seqlens
    out = one_query_attention(q, kv, cu_seqlens, 512, dropout=dropout)
    return out.detach(), *torch.autograd.grad(out, (q, kv), grad)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_it_is_the_definition_to_rounding(dim: int, dtype: torch.dtype, dropout: float) -> None:
    q, kv, grad = row(dim, dtype=dtype)
    found, wanted = differentiated(q, kv, grad, LENGTHS, dropout, dim**-0.5)
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert one.is_contiguous(), f"{name} should be contiguous"
        # each number is rounded once, at the end
        assert relative(one, other) < torch.finfo(dtype).eps / 2, f"{name} is off by {relative(one, other):.1e}"
    empty = torch.tensor(LENGTHS, device=CUDA) == 0
    for name, one in zip(NAMES[:2], found, strict=False):
        assert not one[empty].any(), f"{name} of an empty sequence is not 0"


@pytest.mark.usefixtures("_kernel")
def test_strides_do_not_matter() -> None:
    q, kv, grad = row()
    wanted = whole(q, kv, grad, 0.0)
    # as of a product that is wider than [T, 2 H D], with heads first, and with one gradient for all sequences
    wide = torch.cat([kv, kv], 2).detach()[:, :, 3:].requires_grad_()
    turned = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for name, one, other in zip(NAMES, whole(turned, wide, grad, 0.0), wanted, strict=True):
        assert torch.equal(one, other), f"{name} differs where the arguments are views"
    constant = grad[:1].expand_as(grad)
    expanded = whole(q, kv, constant, 0.0)
    for name, one, other in zip(NAMES, expanded, whole(q, kv, constant.clone(), 0.0), strict=True):
        assert torch.equal(one, other), f"{name} differs where the gradient is expanded"


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("heads", [1, 12])
def test_one_long_sequence_and_many_short_ones(heads: int) -> None:
    for lengths in ((9000,), (3,) * 700):
        q, kv, grad = row(heads=heads, lengths=lengths)
        found, wanted = differentiated(q, kv, grad, lengths, 0.1, 0.125)
        for name, one, other in zip(NAMES, found, wanted, strict=True):
            assert relative(one, other) < 4e-3, f"{name} is off by {relative(one, other):.1e}"


@pytest.mark.usefixtures("_kernel")
def test_a_row_of_no_position_is_zero() -> None:
    q, kv, grad = row(lengths=(0, 0))
    out = one_query_attention(q, kv, bounds((0, 0), "cuda"), 512, dropout=0.1)
    assert not out.any()
    assert not torch.autograd.grad(out, q, grad)[0].any()
    none = one_query_attention(q[:0], kv, bounds((), "cuda"), 512)
    assert none.shape == (0, 3, 64)


@pytest.mark.usefixtures("_kernel")
def test_the_same_seed_gives_the_same_bits() -> None:
    q, kv, grad = row()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(whole(q, kv, grad, 0.1))
    for name, first, again, other in zip(NAMES, *runs, strict=True):
        assert torch.equal(first, again), f"{name} differs between two runs from one seed"
        assert not torch.equal(first, other), f"{name} is the same from two seeds"


@pytest.mark.usefixtures("_kernel")
def test_a_captured_graph_draws_anew_at_every_replay_and_is_what_is_launched() -> None:
    (q, kv, grad), cu_seqlens = row(), bounds(LENGTHS, "cuda")

    def step() -> tuple[Tensor, ...]:
        return whole(q, kv, grad, 0.1, cu_seqlens)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()

    def replay(seed: int | None) -> list[Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        return [part.clone() for part in static]

    first, second, again = replay(1), replay(None), replay(1)
    torch.manual_seed(1)
    eager = step()
    for name, a, b, c, d in zip(NAMES, first, second, again, eager, strict=True):
        assert torch.equal(a, c), f"{name} differs between replays from one seed"
        assert not torch.equal(a, b), f"{name} is the same in two replays one after the other"
        assert torch.equal(a, d), f"{name} of a replay is not that of a launch from the same seed"


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 64), (torch.bfloat16, 80), (torch.float32, 64), (torch.float64, 30)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_it_never_waits_for_the_device(dtype: torch.dtype, dim: int, dropout: float) -> None:
    """Nor does what other types and head sizes take."""
    (q, kv, grad), cu_seqlens = row(dim, dtype=dtype), bounds(LENGTHS, "cuda")
    whole(q, kv, grad, dropout, cu_seqlens)  # compiles, which may wait
    with waits_are_errors():
        whole(q, kv, grad, dropout, cu_seqlens)


@pytest.mark.parametrize(
    ("dtype", "dim", "tolerance"),
    [(torch.bfloat16, 64, 1e-2), (torch.float16, 80, 2e-3), (torch.float32, 64, 2e-3), (torch.float64, 30, 1e-12)],
)
def test_padded_it_is_the_definition_too(dtype: torch.dtype, dim: int, tolerance: float) -> None:
    q, kv, grad = row(dim, dtype=dtype)
    cu_seqlens = bounds(LENGTHS, "cuda")
    out = padded_one_query(q, kv, cu_seqlens, 512, 0.0, dim**-0.5)
    found = (out, *torch.autograd.grad(out, (q, kv), grad))
    exact = [part.detach().double().requires_grad_() for part in (q, kv)]
    wanted = reference(*exact, cu_seqlens, torch.empty(0))
    for name, one, other in zip(
        NAMES, found, (wanted, *torch.autograd.grad(wanted, exact, grad.double())), strict=True
    ):
        assert relative(one, other) < tolerance, f"{name} is off by {relative(one, other):.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padded_and_dropped_the_gradient_is_that_of_the_mask_drawn(dtype: torch.dtype) -> None:
    """Of queries that weigh all keys alike the output shows what multiplies each value, and so does the gradient."""
    lengths, longest = (60, 0, 64, 33), 64
    within = torch.cat([torch.arange(length, device=CUDA) for length in lengths])
    values = torch.eye(longest, device=CUDA)[within][:, None].expand(-1, 2, -1)
    kv = torch.stack([torch.zeros_like(values), values], 1).to(dtype).requires_grad_()
    q = torch.zeros(4, 2, longest, device=CUDA, dtype=dtype)
    out = padded_one_query(q, kv, bounds(lengths, "cuda"), longest, 0.3, 1.0)
    slope = torch.autograd.grad(out, kv, torch.ones_like(out))[0][:, 1, :, 0]
    shown = torch.cat([part[:, :length] for part, length in zip(out.detach(), lengths, strict=True)], 1)
    assert 0.1 < float((shown == 0).float().mean()) < 0.5
    assert torch.equal(shown.T == 0, slope == 0), "the backward pass drops others than the forward pass"


@pytest.mark.usefixtures("_kernel")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_one_compiled_graph_serves_every_row_without_a_concatenation() -> None:
    from torch._inductor.utils import run_and_get_code

    def block(x: Tensor, first: Tensor, weights: list[Tensor], cu_seqlens: Tensor) -> Tensor:
        q, kv = (x.index_select(0, first) @ weights[0]).unflatten(1, (3, 64)), (x @ weights[1]).unflatten(1, (2, 3, 64))
        return one_query_attention(q, kv, cu_seqlens, 512).flatten(1) * 2

    weights = [(torch.randn(192, size, device=CUDA) / 14).bfloat16().requires_grad_() for size in (192, 384)]
    compiled = torch.compile(block, fullgraph=True, dynamic=True)

    def slopes(function: Callable[..., Tensor], x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        out = function(x, cu_seqlens[:-1].long().clamp(max=len(x) - 1), weights, cu_seqlens)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, *weights))

    for index, lengths in enumerate(((300, 41, 0), (512, 512, 77, 0), (129, 8))):
        x = torch.randn(sum(lengths), 192, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        cu_seqlens = bounds(lengths, "cuda")
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            found, codes = run_and_get_code(slopes, compiled, x, cu_seqlens)
        for one, other in zip(found, slopes(block, x, cu_seqlens), strict=True):
            assert relative(one, other) < 1e-2, f"of {lengths} one is off by {relative(one, other):.1e}"
        if index == 0:
            code = "\n".join(codes)
            assert "one_query_attention_backward" in code, "another operator was taken"
            assert "_cat_" not in code, "the gradients are concatenated"
    torch._dynamo.reset()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_operators_keep_the_rules_of_custom_operators(dropout: float) -> None:
    q, kv, _ = row()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (q, kv, bounds(LENGTHS, "cuda"), dropout, 0.125)
    torch.library.opcheck(torch.ops.paceline.one_query_attention.default, arguments, test_utils=checks)
