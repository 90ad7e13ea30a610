"""The kernels of fusion on a GPU, and blocks that are traced or compiled with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from paceline.engine.compile_cache import kept_cache
from paceline.kernels import bias_gelu as gelu_room
from paceline.kernels import residual_norm as norm_room
from paceline.techniques.compile import apply_compile, embeddings_of, fused
from paceline.techniques.fusion import serves
from tests.gpu.waiting import waits_are_errors
from tests.parity.test_compile import FAMILIES, TOTALS, packed_loss, packed_model
from tests.unit.kernels import test_bias_gelu as gelu_cases
from tests.unit.kernels import test_residual_norm as norm_cases

pytestmark = [
    # torch hides both while it compiles, in a way that turning warnings into errors defeats
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

WIDTHS = (100, 384, 768, 1024, 3072, 4096)
DTYPES = (torch.bfloat16, torch.float16)
FOUND = {"modernbert": {"0 norms and 0 GELUs a block"}, "electra": {"1 norm and 1 GELU a block"}}
"""ELECTRA's first block is given the product of its embeddings, in bf16; the others two norms."""


@pytest.fixture(autouse=True)
def _where_it_is_supported() -> None:
    if not serves(torch.empty(1, device="cuda")):
        pytest.skip("the kernels need Triton and compute capability 8.0")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What the allocator hands out next is not a number: a position that is not written shows."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 8, 1 << 16, 1 << 20, 1 << 24) * 4]
    del blocks


@pytest.fixture(scope="module")
def compilers_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch's compilers keep processes and threads for the life of this one: started here, no test leaves them."""
    with kept_cache(tmp_path_factory.mktemp("kernels")):
        hidden = torch.ones(4, 4, device="cuda", requires_grad=True)
        torch.compile(lambda x: x.sin() + 1)(hidden).sum().backward()
        yield


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.pgo.reset_code_state()  # sizes that earlier tests saw to change are remembered
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_is_the_definition(width: int, dtype: torch.dtype, dropout: float) -> None:
    parts = norm_cases.made((1, 1037, width), dtype, device="cuda")
    norm_cases.assert_near(parts, dropout)
    norm_cases.assert_near(parts, dropout, narrow=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_gelu_is_the_definition(width: int, dtype: torch.dtype) -> None:
    gelu_cases.assert_near(gelu_cases.made((1, 1037, width), dtype, device="cuda"))


@pytest.mark.parametrize("positions", [0, 1, 2, 33])
def test_few_positions_are_legal(positions: int) -> None:
    for found in (
        norm_cases.both(norm_cases.made((positions, 768), torch.bfloat16, device="cuda"), 0.1)[0],
        gelu_cases.differentiated(*gelu_cases.made((positions, 768), torch.bfloat16, device="cuda")),
    ):
        assert all(bool(part.isfinite().all()) for part in found)


def steps() -> dict[str, Any]:
    """Kernel -> a function of no arguments that returns results and gradients."""
    *leaves, grad, grad_narrow = norm_cases.made((1, 5000, 768), torch.bfloat16, device="cuda")
    leaves = [leaf.requires_grad_() for leaf in leaves]
    product, bias, slope = gelu_cases.made((1, 5000, 3072), torch.bfloat16, device="cuda")
    ours = [product.requires_grad_(), bias.requires_grad_()]

    def norm() -> tuple[Tensor, ...]:
        out = norm_room.residual_norm(*leaves, dropout=0.1, eps=1e-5, narrow=True)
        return *out, *torch.autograd.grad(out, leaves, (grad, grad_narrow))

    def gelu() -> tuple[Tensor, ...]:
        out = gelu_room.bias_gelu(*ours)
        return out, *torch.autograd.grad(out, ours, slope)

    return {"norm": norm, "gelu": gelu}


@pytest.mark.parametrize("kernel", ["norm", "gelu"])
def test_the_same_seed_gives_the_same_bits_eager_and_captured(kernel: str) -> None:
    step = steps()[kernel]
    eager = []
    for _ in range(2):
        torch.manual_seed(3)
        eager.append([part.detach().clone() for part in step()])
    assert all(map(torch.equal, *eager)), "two runs from one seed differ"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    torch.manual_seed(3)
    graph.replay()
    first = [part.detach().clone() for part in static]
    assert all(map(torch.equal, eager[0], first)), "a replay from the same seed differs from a launch"
    graph.replay()
    assert torch.equal(first[0], static[0]) == (kernel == "gelu"), "each replay should draw anew, and nothing else"


@pytest.mark.parametrize("kernel", ["norm", "gelu"])
def test_they_never_wait_for_the_device(kernel: str) -> None:
    step = steps()[kernel]
    step()  # compiles, which may wait
    with waits_are_errors():
        step()


def trained(kind: str, backend: str) -> tuple[nn.Module, list[float]]:
    """A family with fusion after a pass of every length and ten updates, and their losses."""
    model, blocks = packed_model(kind)
    model.cuda()
    apply_compile(blocks, embeddings_of(model, blocks) if backend == "inductor" else [], backend=backend, fusion=True)

    def loss_of(total: int, sequences: int) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return packed_loss(model, total, sequences)

    for index, total in enumerate(TOTALS):
        loss_of(total, 3 + index % 4).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(256, 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.usefixtures("compilers_running")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_fused_once_for_all_lengths_and_learns(kind: str, backend: str) -> None:
    model, losses = trained(kind, backend)
    # ELECTRA's first block is given another format, or a view, which counts as another input
    spare = 2 if kind == "electra" else 0
    embeddings = int(backend == "inductor")
    assert 0 <= counters["stats"]["unique_graphs"] - FAMILIES[kind] - embeddings <= spare, "a length was traced anew"
    wanted = FOUND.get(kind, {"2 norms and 1 GELU a block"})
    assert set(fused(model)["fusion"].split("; ")) >= wanted
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"


@pytest.mark.usefixtures("compilers_running")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_in_bf16_gradients_are_as_near_fp32_as_the_plain_pass(backend: str) -> None:
    (exact, _), (plain, _), (found, blocks) = (packed_model("bert") for _ in range(3))
    for model in (exact, plain, found):
        model.cuda()
    apply_compile(blocks, backend=backend, fusion=True)
    packed_loss(exact, 512, 4).backward()
    for model in (plain, found):
        with torch.autocast("cuda", torch.bfloat16):
            loss = packed_loss(model, 512, 4)
        loss.backward()

    def distance(model: nn.Module) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return sum((p.grad - q.grad).square().sum().item() for p, q in pairs if q.grad is not None) ** 0.5

    assert distance(found) < 1.5 * distance(plain)
