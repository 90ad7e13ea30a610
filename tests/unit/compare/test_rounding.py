"""What passes for rounding, what does not, and when fp64 is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.compare import Results, beyond_rounding

LOGITS = torch.tensor([[3.0, 4.0]])
GRADIENTS = {"weight": torch.tensor([[3.0, 0.0]]), "bias": torch.tensor([4.0])}
"""Of norm 5, as the logits."""


def off(by: float, what: str = "logits", dtype: torch.dtype = torch.float32) -> Results:
    """Results that are this share of their norm away from the right ones in one place."""
    logits, gradients = LOGITS.to(dtype), {name: slope.to(dtype) for name, slope in GRADIENTS.items()}
    if what == "logits":
        return Results(logits + torch.tensor([[5.0 * by, 0.0]], dtype=dtype), gradients)
    return Results(logits, {**gradients, what: gradients[what] + torch.tensor([5.0 * by], dtype=dtype)})


def never() -> tuple[Results, Results]:
    raise AssertionError("fp64 was asked where fp32 can tell")


def told(found: Results, in_fp64: Any = never, expected: Results | None = None) -> str | None:
    return beyond_rounding("Net", expected or off(0), found, in_fp64, ways=("quick", "plain"))


def test_equal_up_to_a_few_roundings_needs_no_closer_look() -> None:
    assert told(off(5e-6)) is None
    assert told(off(5e-6, "bias")) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (off(0.5), "Net: quick logits differ from plain ones by 5.0e-01 of their norm"),
        (off(0.5, "bias"), "Net: quick and plain gradients of bias differ by 5.0e-01 of the gradient's norm"),
        (off(float("nan")), "Net: quick logits differ from plain ones by inf of their norm"),
        (Results(LOGITS[0], GRADIENTS), "Net: quick logits have the shape (2,), plain ones (1, 2)"),
        (Results(LOGITS, {}), "Net: no gradient reaches the parameters from quick logits"),
    ],
)
def test_a_large_difference_is_a_fault(found: Results, reason: str) -> None:
    assert told(found) == reason


@pytest.mark.parametrize("what", ["logits", "bias"])
def test_fp64_tells_what_fp32_cannot(what: str) -> None:
    def rounding() -> tuple[Results, Results]:
        return off(0, dtype=torch.float64), off(1e-9, what, torch.float64)

    def fault() -> tuple[Results, Results]:
        return off(0, dtype=torch.float64), off(1e-3, what, torch.float64)

    assert told(off(1e-3, what), rounding) is None
    assert "1.0e-03" in str(told(off(1e-3, what), fault))


def test_fp64_is_final() -> None:
    assert told(off(1e-9, dtype=torch.float64), expected=off(0, dtype=torch.float64)) is not None


def test_a_model_that_fails_in_fp64_is_judged_by_fp32() -> None:
    def fails() -> tuple[Results, Results]:
        raise RuntimeError("no such kernel")

    def full() -> tuple[Results, Results]:
        raise torch.OutOfMemoryError

    assert "1.0e-03" in str(told(off(1e-3), fails))
    with pytest.raises(torch.OutOfMemoryError):
        told(off(1e-3), full)


def test_nothing_expected_allows_nothing() -> None:
    zeros = torch.zeros(1, 2)
    assert told(Results(zeros, {}), expected=Results(zeros, {})) is None
    reason = told(Results(zeros + 1e-3, {}), expected=Results(zeros, {}))
    assert reason == "Net: quick logits differ from plain ones by inf of their norm"
