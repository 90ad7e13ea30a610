"""What operators take for themselves, by their shapes."""

from __future__ import annotations

import pytest
import torch

from paceline.memory import workspaces
from paceline.memory.workspaces import workspace_bytes

SUM = "aten.sum.dim_IntList"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's."""
    monkeypatch.setattr(workspaces, "gpu_name", lambda device: "NVIDIA H200")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_sum_over_many_rows_takes_what_was_seen_on_a_gpu() -> None:
    """In the trace of a captured step of BERT-base: between a product's gradients, and freed at once."""
    assert workspace_bytes(SUM, (rows(10_240, 1_536), [0], True)) == 125_829_120


def test_a_gpu_with_fewer_threads_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "gpu_name", lambda device: "NVIDIA A10")
    # 72 multiprocessors of 12 blocks each, for 12 pieces of the results
    assert workspace_bytes(SUM, (rows(10_240, 1_536), [0])) == 4 * 1_536 * 128 * 72


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((255, 1_536), [0]),  # a thread each adds them up
        ((10_240, 1_536), [1]),  # along the rows
        ((10_240, 1_536), [0, 1]),
        ((10_240, 1_536), []),
        ((16,), [0]),
        ((10_240, 0), [0]),
    ],
)
def test_other_sums_take_nothing_that_is_known(shape: tuple[int, ...], dims: list[int]) -> None:
    assert workspace_bytes(SUM, (rows(*shape), dims)) == 0


def test_leading_dimensions_count_as_one_and_the_rest_is_left_alone() -> None:
    whole = workspace_bytes(SUM, (rows(10_240, 1_536), [0]))
    assert workspace_bytes(SUM, (rows(20, 512, 1_536), [0, -2])) == whole
    assert workspace_bytes(SUM, (rows(1_536, 10_240).t(), [0])) == 0
    assert workspace_bytes(SUM, (rows(10_240, 1_536, dtype=torch.float64), [0])) == 0
    assert workspace_bytes("aten.sum.default", (rows(10_240, 1_536),)) == 0
