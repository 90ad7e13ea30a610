"""Short attention on a GPU: right to rounding, exact in what it drops, blind to strides, legal in captured graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels import varlen_attention
from paceline.kernels.short_attention import short_attention, supports
from paceline.kernels.torch_attention import flash_joined
from tests.gpu.waiting import waits_are_errors
from tests.unit.kernels.test_short_attention import bounds, reference, relative

CUDA = torch.device("cuda")
LENGTHS = (512, 511, 385, 300, 273, 129, 128, 127, 65, 64, 63, 17, 2, 1, 0, 0, 0)
"""Longest first, whole tiles and one more and one less, zero-length slots at the end; 2577 positions."""
NAMES = ("output", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _where_it_is_supported() -> None:
    reason = supports(torch.empty(1, 1, 64, dtype=torch.bfloat16, device=CUDA), 512)
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What the allocator hands out next is not a number: a position that is not written shows."""
    blocks = [torch.full((size,), float("nan"), device=CUDA) for size in (1 << 8, 1 << 16, 1 << 20, 1 << 24) * 4]
    del blocks


def row(dim: int = 64, heads: int = 3, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """q, k, v and the output's gradient, [T, H, D]."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    shape = (4, sum(LENGTHS), heads, dim)
    return list(torch.randn(shape, generator=generator, device=CUDA).to(dtype).unbind(0))


def differentiated(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def ours(dropout: float = 0.0) -> Callable[..., Tensor]:
    cu_seqlens = bounds(LENGTHS, "cuda")
    return lambda q, k, v: short_attention(q, k, v, cu_seqlens, 512, dropout=dropout)


def exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dropout: float = 0.0, keys: Tensor | None = None
) -> tuple[Tensor, ...]:
    keys = torch.empty(2, 0, dtype=torch.int32, device=CUDA) if keys is None else keys
    scale = q.shape[2] ** -0.5
    return differentiated(
        lambda *parts: reference(*parts, bounds(LENGTHS), keys, dropout, scale),
        *(part.double() for part in (q, k, v)),
        grad,
    )


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = bounds(LENGTHS, "cuda")
    out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 512, 512, 0.0, False, False)[0]
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_it_is_as_close_to_the_definition_as_flash_attention(dim: int, dtype: torch.dtype) -> None:
    parts = row(dim, dtype=dtype)
    wanted = exact(*parts)
    peers = differentiated(flash, *parts)
    for name, found, peer, right in zip(NAMES, differentiated(ours(), *parts), peers, wanted, strict=True):
        error, peer_error = relative(found, right), relative(peer, right)
        assert error < 1e-2, f"{name} is off by {error:.1e}"
        assert error < 1.5 * peer_error + 1e-6, f"{name} is off by {error:.1e}, FlashAttention's by {peer_error:.1e}"


@pytest.mark.parametrize("dropout", [0.1, 0.5])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_exactly_the_elements_that_the_keys_say_are_dropped(dim: int, dropout: float) -> None:
    q, k, v, grad = row(dim)
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    arguments = (*leaves, bounds(LENGTHS, "cuda"), 512, dropout, dim**-0.5)
    out, _, keys = torch.ops.paceline.short_attention(*arguments)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    for name, one, other in zip(NAMES, found, exact(q, k, v, grad, dropout, keys), strict=True):
        assert relative(one, other) < 1e-2, f"{name} is off by {relative(one, other):.1e}"


def test_strides_do_not_matter() -> None:
    parts = row()
    wanted = differentiated(ours(), *parts)
    fused = torch.stack(parts, 1).flatten(1).unflatten(1, (4, 3, 64)).unbind(1)
    by_head = [part.transpose(0, 1).contiguous()[None].transpose(1, 2)[0] for part in parts]
    constant = parts[3][:1].expand_as(parts[3])
    for layout, views in {"fused": fused, "by head": by_head}.items():
        assert not views[0].is_contiguous(), "the test lost its point"
        for name, found, right in zip(NAMES, differentiated(ours(), *views), wanted, strict=True):
            assert torch.equal(found, right), f"{name} differs where the arguments are laid out {layout}"
    expanded = differentiated(ours(), *parts[:3], constant)
    for name, found, right in zip(NAMES, expanded, differentiated(ours(), *parts[:3], constant.clone()), strict=True):
        assert torch.equal(found, right), f"{name} differs where the gradient is expanded"


def test_the_same_seed_gives_the_same_bits() -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(differentiated(ours(0.1), *row()))
    for name, first, again, other in zip(NAMES, *runs, strict=True):
        assert torch.equal(first, again), f"{name} differs between two runs from one seed"
        assert not torch.equal(first, other), f"{name} is the same from two seeds"


def test_a_captured_graph_draws_anew_at_every_replay_and_obeys_the_seed() -> None:
    parts = row()
    leaves = [part.detach().requires_grad_() for part in parts[:3]]
    arguments = (*leaves, bounds(LENGTHS, "cuda"), 512, 0.1, 0.125)

    def step() -> tuple[Tensor, ...]:
        out, _, keys = torch.ops.paceline.short_attention(*arguments)
        return keys, out, *torch.autograd.grad(out, leaves, parts[3])

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

    first, second, again, other = replay(1), replay(None), replay(1), replay(2)
    for name, a, b, c, d in zip(("keys", *NAMES), first, second, again, other, strict=True):
        assert torch.equal(a, c), f"{name} differs between replays from one seed"
        assert not torch.equal(a, b), f"{name} is the same in two replays one after the other"
        assert not torch.equal(a, d), f"{name} is the same from two seeds"
    for run in (first, other):
        for name, found, right in zip(NAMES, run[1:], exact(*parts, 0.1, run[0]), strict=True):
            assert relative(found, right) < 1e-2, f"{name} of a replay is off by {relative(found, right):.1e}"


@pytest.mark.parametrize("operator", ["short", "flash"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_joined_and_apart_are_the_same_bits(
    dim: int, dropout: float, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "operator_for", lambda *_: operator)
    *states, grad = row(dim)
    qkv, cu_seqlens = torch.stack(states, 1).requires_grad_(), bounds(LENGTHS, "cuda")
    found = []
    for joined in (True, False):
        torch.manual_seed(0)
        if joined:
            out = varlen_attention.varlen_attention_joined(qkv, cu_seqlens, 512, dropout=dropout)
        else:
            out = varlen_attention.varlen_attention(*qkv.unbind(1), cu_seqlens, 512, dropout=dropout)
        found.append((out.detach(), *torch.autograd.grad(out, qkv, grad)[0].unbind(1)))
    for name, one, other in zip(NAMES, *found, strict=True):
        if operator == "flash" and name == "dq":  # summed by atomic additions, in any order
            assert relative(one, other) < 1e-2, f"{name} is off by {relative(one, other):.1e}"
        else:
            assert torch.equal(one, other), f"{name} is off by {relative(one, other):.1e}"


def test_a_joined_call_in_a_captured_graph_waits_for_nothing_and_draws_anew() -> None:
    *states, grad = row()
    qkv, cu_seqlens = torch.stack(states, 1).requires_grad_(), bounds(LENGTHS, "cuda")

    def step() -> tuple[Tensor, ...]:
        out, _, keys = torch.ops.paceline.short_attention_joined(qkv, cu_seqlens, 512, 0.1, 0.125)
        return keys, out, *torch.autograd.grad(out, qkv, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    runs = []
    for _ in range(2):
        graph.replay()
        runs.append([part.clone() for part in static])
    assert not torch.equal(runs[0][1], runs[1][1]), "two replays drop the same"
    for keys, out, slope in runs:
        found = (out, *slope.unbind(1))
        for name, one, right in zip(NAMES, found, exact(*states, grad, 0.1, keys), strict=True):
            assert relative(one, right) < 1e-2, f"{name} of a replay is off by {relative(one, right):.1e}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own
@pytest.mark.parametrize("operator", ["short", "flash"])
def test_a_compiled_joined_product_is_differentiated_without_a_concatenation(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(varlen_attention, "operator_for", lambda *_: operator)
    cu_seqlens = bounds(LENGTHS, "cuda")

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        qkv = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (3, 3, 64))
        return varlen_attention.varlen_attention_joined(qkv.squeeze(0), cu_seqlens, 512)

    x = torch.randn(1, sum(LENGTHS), 192, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(576, 192, device=CUDA, dtype=torch.bfloat16) / 14).requires_grad_()
    bias = torch.zeros(576, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True)

    def slopes(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(x, weight, bias)
        return torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))

    found, codes = run_and_get_code(slopes, compiled)
    for name, one, other in zip(("x", "weight", "bias"), found, slopes(block), strict=True):
        assert relative(one, other) < 1e-2, f"the gradient of {name} is off by {relative(one, other):.1e}"
    code = "\n".join(codes)
    assert "joined_backward" in code, "another operator was taken"
    assert "_cat_" not in code, "the gradients are concatenated"


def test_very_negative_scores_do_not_overflow() -> None:
    q, k, v, grad = row()
    far = 30 * torch.ones_like(q)
    for name, found in zip(NAMES, differentiated(ours(), far + q, k - far, v, grad), strict=True):
        assert bool(found.isfinite().all()), f"{name} is not finite"


def test_it_never_waits_for_the_device() -> None:
    attention, parts = ours(0.1), row()
    differentiated(attention, *parts)  # compiles, which may wait
    with waits_are_errors():
        differentiated(attention, *parts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_one_compiled_graph_serves_every_number_of_positions() -> None:
    def block(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (x @ weight).unflatten(1, (3, 3, 64)).unbind(1)
        return short_attention(q, k, v, cu_seqlens, 512).flatten(1) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    weight = torch.randn(192, 576, device=CUDA, dtype=torch.bfloat16) / 14
    for lengths in ((300, 41, 0), (512, 512, 77, 0), (129, 0)):
        x = torch.randn(sum(lengths), 192, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        cu_seqlens = bounds(lengths, "cuda")
        with torch._dynamo.config.patch(error_on_recompile=lengths[0] != 300):
            found = compiled(x, weight, cu_seqlens)
        wanted = block(x, weight, cu_seqlens)
        assert relative(found, wanted) < 1e-2, f"the output of {lengths} is off by {relative(found, wanted):.1e}"
        grads = [torch.autograd.grad(out.float().square().sum(), x)[0] for out in (found, wanted)]
        assert relative(*grads) < 1e-2, f"the gradient of {lengths} is off by {relative(*grads):.1e}"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_operators_keep_the_rules_of_custom_operators(dropout: float) -> None:
    q, k, v, _ = (part.requires_grad_() for part in row())
    arguments = (q, k, v, bounds(LENGTHS, "cuda"), 512, dropout, 0.125)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.paceline.short_attention.default, arguments, test_utils=checks)
    joined = (torch.stack((q, k, v), 1).detach().requires_grad_(), *arguments[3:])
    torch.library.opcheck(torch.ops.paceline.short_attention_joined.default, joined, test_utils=checks)
    torch.library.opcheck(flash_joined, (*joined, -1), test_utils=checks)
