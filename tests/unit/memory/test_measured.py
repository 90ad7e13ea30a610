"""Predictions beside what a card showed: measured on one H200, 2026-11-20, torch 2.11, transformers 5.17."""

from __future__ import annotations

import pytest

from tests.unit.memory.apart import run

WHAT = ("allocated", "reserved", "total")
MEASURED = {
    "base, fp32": (2574.2, 2956, 4322),
    "base, bf16": (2352.0, 2588, 3970),
    "base, fp32, recomputed, fused AdamW": (1779.1, 2012, 3378),
    "large, fp32, eager attention": (10611.6, 10972, 12338),
}
"""MiB: torch.cuda.max_memory_allocated and max_memory_reserved, and what NVML showed of the process."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Of each loop, by what share the predictions are above what was measured."""
    found = run("tests.unit.memory.measured", cache=tmp_path_factory.mktemp("cache"))
    assert found.keys() == MEASURED.keys()
    return {
        name: {what: found[name][what] / 2**20 / truth - 1 for what, truth in zip(WHAT, figures, strict=True)}
        for name, figures in MEASURED.items()
    }


def test_allocated_is_within_one_and_a_half_per_cent(shares: dict[str, dict[str, float]]) -> None:
    assert all(abs(found["allocated"]) < 0.015 for found in shares.values()), shares


def test_reserved_and_total_are_within_a_few_per_cent(shares: dict[str, dict[str, float]]) -> None:
    assert all(abs(found["reserved"]) < 0.1 and abs(found["total"]) < 0.08 for found in shares.values()), shares


@pytest.mark.xfail(
    strict=True, reason="reserved is up to 5 % low in a plain loop, so that the total is up to 3 %: open"
)
def test_the_total_is_never_two_per_cent_below(shares: dict[str, dict[str, float]]) -> None:
    assert all(found["total"] > -0.02 for found in shares.values()), shares
