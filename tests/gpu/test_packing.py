"""Packed rows on a GPU: every operator against each sequence alone, dropout's law, capture, and no waiting."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.dataset import Tokens
from paceline.data.layout import PackedLayout, PaddedLayout
from paceline.kernels import varlen_attention
from paceline.kernels.torch_attention import efficient
from paceline.kernels.varlen_attention import operator_for, padded_attention
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Build
from paceline.tasks import task_for
from paceline.techniques import packing
from paceline.techniques.packing import difference, first_position
from paceline.techniques.precision import apply_precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.test_packing import PACKABLE, model_of

CUDA = torch.device("cuda")
HEADS, SIZE, LONGEST = 4, 64, 512
BOUNDS = [0, 512, 600, 1000, 1001, 1100, 1400, 1400, 1400]
attend = varlen_attention.varlen_attention

# operator, number format, window, tolerance relative to the largest value
CASES = [
    ("flash", torch.bfloat16, None, 2e-2),
    ("flash", torch.bfloat16, 64, 2e-2),
    ("flash", torch.float16, None, 3e-3),
    ("efficient", torch.float32, None, 1e-5),
    ("padded", torch.float32, 64, 1e-5),
    ("padded", torch.float64, None, 1e-10),
]


@pytest.fixture(autouse=True)
def torchs_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "PREFER_SHORT", False)


def states(dtype: torch.dtype, total: int = BOUNDS[-1], seed: int = 0) -> list[Tensor]:
    """q, k, v as views of one fused tensor, and a gradient: [T, H, D]."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    fused = torch.randn(total, 3, HEADS, SIZE, generator=generator, device=CUDA).to(dtype)
    grad = torch.randn(total, HEADS, SIZE, generator=generator, device=CUDA).to(dtype)
    return [*(t.requires_grad_() for t in fused.unbind(1)), grad]


def cu(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=CUDA)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Softmax of the products, sequence after sequence, in fp64."""
    parts = []
    for first, end in itertools.pairwise(BOUNDS):
        rows = [t[first:end].double().transpose(0, 1) for t in (q, k, v)]
        at = torch.arange(end - first, device=CUDA)
        far = torch.zeros(end - first, end - first, device=CUDA, dtype=torch.bool)
        if window is not None:
            far = (at[:, None] - at).abs() > window
        weights = (rows[0] @ rows[1].transpose(1, 2) / math.sqrt(SIZE)).masked_fill(far, -torch.inf).softmax(-1)
        parts.append((weights @ rows[2]).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("operator", "dtype", "window", "tolerance"), CASES)
def test_output_and_gradients_are_those_of_each_sequence_alone(
    operator: str, dtype: torch.dtype, window: int | None, tolerance: float
) -> None:
    q, k, v, grad = states(dtype)
    assert operator_for(q, LONGEST, 0.0, window) == operator
    expected = one_by_one(q, k, v, window)
    slopes = torch.autograd.grad(expected, (q, k, v), grad.double())
    bounds = cu(BOUNDS)
    with waits_are_errors():
        out = attend(q, k, v, bounds, LONGEST, window=window)
        found = torch.autograd.grad(out, (q, k, v), grad)
    assert out.is_contiguous()
    for name, one, other in zip(("out", "q", "k", "v"), (out, *found), (expected, *slopes), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max(), name


@pytest.mark.parametrize("name", ["efficient", "padded_attention"])
def test_the_fallbacks_of_half_precision(name: str) -> None:
    """What older GPUs take, and odd head sizes."""
    q, k, v, grad = states(torch.float16)
    expected = one_by_one(q, k, v, None)
    if name == "efficient":
        out = efficient(q, k, v, cu(BOUNDS), LONGEST, 0.0, SIZE**-0.5)[0]
    else:
        out = padded_attention(q, k, v, cu(BOUNDS), LONGEST)
    found = torch.autograd.grad(out, (q, k, v), grad)
    slopes = torch.autograd.grad(expected, (q, k, v), grad.double())
    for one, other in zip((out, *found), (expected, *slopes), strict=True):
        assert (one - other).abs().max() <= 3e-3 * other.abs().max()


DRAWN = [("flash", torch.bfloat16, None), ("padded", torch.float32, None), ("padded", torch.float32, 64)]


@pytest.mark.parametrize(("operator", "dtype", "window"), DRAWN)
def test_dropout_keeps_the_mean_and_repeats_with_its_seed(
    operator: str, dtype: torch.dtype, window: int | None
) -> None:
    q, k, v, _ = (t.detach() for t in states(dtype))
    bounds, draws, dropout = cu(BOUNDS), 400, 0.3
    assert operator_for(q, LONGEST, dropout, window) == operator
    expected = one_by_one(q, k, v, window)
    total, squares = torch.zeros_like(expected), torch.zeros_like(expected)
    for seed in range(draws):
        torch.manual_seed(seed)
        out = attend(q, k, v, bounds, LONGEST, dropout=dropout, window=window).double()
        total, squares = total + out, squares + out.square()
    mean = total / draws
    error = ((squares / draws - mean.square()).clamp(min=0) / draws).sqrt() + 5e-3 * expected.abs() + 1e-6
    # a handful of a third of a million values may stray by more than five errors, none by ten
    assert ((mean - expected).abs() > 5 * error).double().mean() < 1e-3
    assert (mean - expected).abs().max() < 10 * error.max()
    assert squares.sub(draws * mean.square()).mean() > 0, "nothing was dropped"
    torch.manual_seed(draws - 1)
    assert torch.equal(attend(q, k, v, bounds, LONGEST, dropout=dropout, window=window).double(), out)


@pytest.mark.parametrize(("operator", "dtype", "window"), DRAWN)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(
    operator: str, dtype: torch.dtype, window: int | None
) -> None:
    """With the mask fixed the output is linear in V, so that <grad, out> is <dV, V> to rounding."""
    q, k, v, grad = states(dtype)
    bounds = cu(BOUNDS)
    for _ in range(3):
        with waits_are_errors():
            out = attend(q, k, v, bounds, LONGEST, dropout=0.5, window=window)
            slope = torch.autograd.grad(out, v, grad)[0]
        left, right = (grad.double() * out.double()), (slope.double() * v.double())
        assert abs(left.sum() - right.sum()) < (2e-3 if dtype == torch.bfloat16 else 1e-5) * left.abs().sum()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize(("operator", "dtype", "window"), DRAWN)
def test_a_captured_call_reads_new_bounds_and_draws_new_dropout(
    operator: str, dtype: torch.dtype, window: int | None
) -> None:
    q, k, v, grad = states(dtype)
    bounds = cu(BOUNDS)
    other = cu([0, 100, 400, 900, 1388, 1400, 1400, 1400, 1400])
    for dropout in (0.0, 0.3):

        def step(dropout: float = dropout) -> tuple[Tensor, ...]:
            out = attend(q, k, v, bounds, LONGEST, dropout=dropout, window=window)
            return (out, *torch.autograd.grad(out, (q, k, v), grad))

        bounds.copy_(cu(BOUNDS))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        bounds.copy_(other)
        graph.replay()
        first = [t.clone() for t in captured]
        graph.replay()
        if dropout:
            assert not torch.equal(captured[0], first[0]), "a replay draws the same dropout again"
            left, right = grad.double() * captured[0].double(), captured[3].double() * v.double()
            assert abs(left.sum() - right.sum()) < 2e-3 * left.abs().sum(), "the mask of the backward pass is another"
        else:
            for one, eager in zip(captured, step(), strict=True):
                torch.testing.assert_close(one, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.bfloat16, 0.0), (torch.bfloat16, 0.1), (torch.float32, 0.0)])
def test_inductor_sees_through_the_operators_once_for_all_lengths(dtype: torch.dtype, dropout: float) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return attend(q * 2, k, v, bounds, LONGEST, dropout=dropout) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for bounds in (BOUNDS, [0, 500, 600, 700, 960, 960, 960, 960, 960]):
        q, k, v, grad = (t.detach().contiguous().requires_grad_(i < 3) for i, t in enumerate(states(dtype, bounds[-1])))
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 0)
        with torch._dynamo.config.patch(error_on_recompile=bounds is not BOUNDS):
            out = compiled(q, k, v, cu(bounds))
            found = torch.autograd.grad(out, (q, k, v), grad)
        if not dropout:
            expected = layer(q, k, v, cu(bounds))
            for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert all(t.isfinite().all() for t in (out, *found))
    torch._dynamo.reset()


# -- whole models ------------------------------------------------------------------------------------------------------

LENGTHS = (5, 31, 2, 17, 1, 40, 23, 9)
IDS = np.array([6, 1, 4, 0, 5, 3, 2, 7])


def made(family: str) -> tuple[Build, PackedLayout]:
    rng = np.random.default_rng(2)
    model: Any = model_of(family).to(CUDA)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    tokens = Tokens(rng.integers(5, 120, sum(LENGTHS)).astype(np.uint16), offsets, model.config.pad_token_id)
    labels = rng.integers(0, 3, len(LENGTHS))
    packed = PackedLayout(
        tokens, labels, CUDA, token_types=False, first_position=first_position(model), bucket=64, resident=True
    )
    padded = PaddedLayout(tokens, labels, CUDA, token_types=False)
    task = task_for("classification", ("a", "b", "c"), TaskPart())
    return Build(model=model, forward=plainly, layout=padded, task=task, device=CUDA), packed


def plainly(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch.inputs).logits


@pytest.mark.parametrize("family", PACKABLE)
def test_every_family_is_packed_on_a_gpu(family: str) -> None:
    build, packed = made(family)
    state = torch.cuda.get_rng_state()
    assert difference(build, packed, IDS) is None
    assert torch.equal(torch.cuda.get_rng_state(), state), "random numbers were drawn"
    done = packing.apply(build, packed, IDS, required=True, dtype=torch.bfloat16)
    assert dict(done.execution) == {"layout": "packed", "attention": "flash"}


def test_a_model_that_cannot_be_packed_is_found_out_on_a_gpu() -> None:
    build, packed = made("deberta-v2")
    assert packing.apply(build, packed, IDS).execution == {"layout": "padded"}


@pytest.mark.parametrize("family", PACKABLE)
def test_a_packed_step_in_bf16_stays_near_the_padded_one_in_fp32_and_never_waits(family: str) -> None:
    build, packed = made(family)
    padded_batch, packed_batch = build.layout.collate(IDS), packed.collate(IDS)
    exact = F.cross_entropy(plainly(build.model, padded_batch), padded_batch.labels)
    exact.backward()
    slopes = {name: p.grad.clone() for name, p in build.model.named_parameters() if p.grad is not None}
    build.model.zero_grad(set_to_none=True)
    done = packing.apply(build, packed, IDS, required=True, dtype=torch.bfloat16)
    done = replace(done, forward=apply_precision(done.forward, "bf16", CUDA))
    done.forward(done.model, packed_batch)  # the first call loads kernels
    with waits_are_errors():
        loss = F.cross_entropy(done.forward(done.model, packed_batch).float(), packed_batch.labels)
        loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    norm = torch.stack([slope.norm() for slope in slopes.values()]).norm()
    apart = torch.stack([(p.grad - slopes[n]).norm() for n, p in build.model.named_parameters() if n in slopes]).norm()
    assert apart < 0.1 * norm
