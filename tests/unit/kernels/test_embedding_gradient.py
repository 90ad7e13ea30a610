"""Gradients of embeddings: sums of rows by id, whatever the ids are.

On a CPU the operator is torch's own. The kernels run here only under ``TRITON_INTERPRET=1`` (slow, no GPU needed), by
the same tests; tests/gpu runs them on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.kernels.embedding_gradient import CHUNK, embedding

pytestmark = [
    # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def drawn(name: str, rows: int = 50) -> Tensor:
    """Ids whose equal runs, once sorted, lie in every way across chunks."""
    generator = torch.Generator().manual_seed(0)
    return {
        "one": torch.tensor([3]),
        "of many": torch.randint(rows, (4, 37), generator=generator),
        "all equal": torch.full((20 * CHUNK + 5,), 7),
        "a chunk each": torch.arange(6).repeat_interleave(CHUNK),
        "cut in the middle": torch.arange(6).repeat_interleave(CHUNK + CHUNK // 2),
        "up to a chunk's end": torch.tensor([0] * (CHUNK // 2) + [1] * (CHUNK // 2) + [2] * 3),
        "once each": torch.randperm(rows, generator=generator),
        "first and last row": torch.tensor([rows - 1, 0] * CHUNK),
        "hot and rare": torch.where(torch.rand(700, generator=generator) < 0.8, 5, torch.arange(700) % rows),
    }[name]


NAMES = ("one", "of many", "all equal", "a chunk each", "cut in the middle", "up to a chunk's end", "once each",
         "first and last row", "hot and rare")  # fmt: skip


def differentiated(ids: Tensor, grad: Tensor, rows: int, padding_idx: int | None = None) -> Tensor:
    weight = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device, requires_grad=True)
    (found,) = torch.autograd.grad(embedding(ids, weight, padding_idx), [weight], grad)
    return found


def exact(ids: Tensor, grad: Tensor, rows: int, padding_idx: int | None = None) -> Tensor:
    """In fp64."""
    wide = grad.double().reshape(-1, grad.shape[-1])
    found = wide.new_zeros(rows, grad.shape[-1]).index_add_(0, ids.reshape(-1), wide)
    if padding_idx is not None:
        found[padding_idx] = 0
    return found


def assert_near(ids: Tensor, width: int, rows: int, dtype: torch.dtype, padding_idx: int | None = None) -> None:
    generator = torch.Generator(ids.device).manual_seed(1)
    grad = torch.randn(*ids.shape, width, generator=generator, device=ids.device).to(dtype)
    found, wanted = differentiated(ids, grad, rows, padding_idx), exact(ids, grad, rows, padding_idx)
    assert found.dtype == dtype
    bound = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((found.double() - wanted).abs() <= bound * (wanted.abs() + 30)).all()
    assert torch.equal(found != 0, wanted != 0), "rows that do not occur are zeros"
    assert torch.equal(found, differentiated(ids, grad, rows, padding_idx)), "two times, two results"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [16, 300])
def test_rows_are_the_sums_of_their_occurrences(name: str, width: int) -> None:
    assert_near(drawn(name), width, 50, torch.float32)


@pytest.mark.parametrize("padding_idx", [5, 7, -1])
@pytest.mark.parametrize("name", ["all equal", "hot and rare", "first and last row"])
def test_the_row_of_padding_has_no_gradient(name: str, padding_idx: int) -> None:
    assert_near(drawn(name), 24, 50, torch.float32, padding_idx)


def test_half_formats_are_summed_in_fp32() -> None:
    assert_near(drawn("hot and rare"), 40, 50, torch.float16)


def test_ids_beyond_sixteen_bits() -> None:
    assert_near(torch.tensor([40_000, 2, 65_000, 40_000, 32_767, 32_768]), 8, 70_000, torch.float32)


def test_no_ids_at_all() -> None:
    found = differentiated(torch.zeros(0, dtype=torch.long), torch.zeros(0, 4), 3)
    assert torch.equal(found, torch.zeros(3, 4))


def test_the_lookup_is_torchs_own_and_so_is_its_fake() -> None:
    weight, ids = torch.randn(5, 4), torch.tensor([[1, 4], [0, 1]])
    assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))
    with FakeTensorMode():
        weight, ids = torch.randn(5, 4, requires_grad=True), torch.zeros(2, 3, dtype=torch.long)
        (found,) = torch.autograd.grad(embedding(ids, weight).sum(), [weight])
        assert found.shape == weight.shape


# torch's compiler makes one of the class itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_is_compiled_as_one_graph() -> None:
    ids, weight = drawn("of many"), torch.randn(50, 8, requires_grad=True)
    compiled = torch.compile(lambda w: (embedding(ids, w) * 2).square().sum(), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(weight), [weight])
    (wanted,) = torch.autograd.grad((F.embedding(ids, weight) * 2).square().sum(), [weight])
    torch.testing.assert_close(found, wanted)
