"""What a check takes for rounding, and what it says of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.check.claim import Broken
from paceline.check.difference import difference, furthest, same_bits, same_up_to_rounding


def measured(scale: float = 1.0, **changed: float) -> dict[str, dict[str, Tensor]]:
    """Two gradients of norm 1 together."""
    first = torch.tensor([0.6 * scale + changed.get("first", 0.0)])
    return {"gradient": {"first": first, "second": torch.tensor([0.8 + changed.get("second", 0.0)])}}


def test_the_first_tensor_that_differs_is_named_and_the_one_that_differs_most() -> None:
    seen = difference(measured(), measured(first=0.01, second=0.05), 1e-4)
    assert seen is not None
    assert seen.tensor == "gradient of first"
    assert seen.away == pytest.approx(0.01 / 0.6, rel=1e-4)
    assert (seen.worst, seen.furthest) == ("gradient of second", pytest.approx(0.05 / 0.8, rel=1e-4))
    assert difference(measured(), measured(second=5e-5), 1e-4) is None
    assert furthest(measured(), measured(second=5e-5)) == pytest.approx(5e-5 / 0.8, rel=1e-2)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"gradient": {"first": torch.zeros(1)}}, "the gradient of second is not there"),
        ({"gradient": {"first": torch.zeros(2), "second": torch.zeros(1)}}, r"of first has the shape \(2,\)"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_a_difference(found: Any, told: str) -> None:
    with pytest.raises(Broken, match=told):
        difference(measured(), found, 1e-4)


def test_a_small_tensor_is_measured_by_itself_and_what_is_nearly_nothing_by_the_others() -> None:
    large, small = torch.tensor([1.0]), torch.tensor([1e-2])
    expected = {"gradient": {"large": large, "small": small}}
    seen = difference(expected, {"gradient": {"large": large, "small": small * 1.5}}, 0.1)
    assert seen is not None
    assert seen.tensor == "gradient of small"
    assert difference(expected, {"gradient": {"large": large, "small": small * 1.5}}, 0.1, floors=False) is None
    nothing = {"gradient": {"large": large, "small": torch.tensor([1e-9])}}
    assert difference(nothing, {"gradient": {"large": large, "small": torch.tensor([-1e-9])}}, 1e-4) is None


def test_what_is_no_number_differs() -> None:
    seen = difference(measured(), measured(second=float("nan")), 1e-4)
    assert seen is not None
    assert seen.tensor == "gradient of second"


def test_near_enough_is_not_looked_at_again() -> None:
    asked: list[bool] = []

    def compute(double: bool) -> Any:
        asked.append(double)
        return measured(), measured(first=5e-5)

    assert same_up_to_rounding(compute, "one and other") == pytest.approx(5e-5 / 0.6, rel=1e-2)
    assert asked == [False]


@pytest.mark.parametrize(("in_fp64", "holds"), [(1e-8, True), (1e-3, False)])
def test_what_is_further_is_judged_in_fp64(in_fp64: float, holds: bool) -> None:
    def compute(double: bool) -> Any:
        return measured(), measured(first=in_fp64 if double else 1e-3)

    if holds:
        same_up_to_rounding(compute, "one and other")
        return
    with pytest.raises(Broken, match=r"^one and other differ in the gradient of first, by 1\.7e-03 of its norm$"):
        same_up_to_rounding(compute, "one and other")


def test_a_model_without_fp64_is_judged_by_fp32() -> None:
    def compute(double: bool) -> Any:
        if double:
            raise RuntimeError("no kernel for it")
        return measured(), measured(first=1e-3)

    with pytest.raises(Broken, match=r"by 1\.0e-03"):
        same_up_to_rounding(compute, "one and other")


def test_what_is_far_away_is_not_computed_again() -> None:
    def compute(double: bool) -> Any:
        assert not double, "a difference of a half is no rounding"
        return measured(), measured(first=0.5)

    with pytest.raises(Broken):
        same_up_to_rounding(compute, "one and other")


def test_bits_are_bits() -> None:
    one = {"weight": torch.tensor([1.0, float("nan")])}
    same_bits(one, {"weight": one["weight"].clone()}, "twice")
    with pytest.raises(Broken, match="weight differs by"):
        same_bits(one, {"weight": one["weight"] + 1e-7}, "twice")
    with pytest.raises(Broken, match="weight is not there"):
        same_bits(one, {}, "twice")
