"""The kernels of embeddings' gradients, compiled for this GPU: the definition's sums, and the same bits each time."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.test_embedding_gradient import NAMES, assert_near, drawn

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_sums_of_their_occurrences(name: str, dtype: torch.dtype) -> None:
    assert_near(drawn(name).to(CUDA), 768, 50, dtype)


@pytest.mark.parametrize("rows", [512, 30_522, 50_265])
@pytest.mark.parametrize("count", [3_000, 17_408, 33_280])
def test_as_many_ids_as_a_step_has(count: int, rows: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    share = torch.rand(count, generator=generator, device=CUDA)
    ids = (rows * share**4).long()  # a few are frequent, as words are
    assert_near(ids, 768, rows, torch.float32, padding_idx=0)
