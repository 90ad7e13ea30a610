"""Learning rates by the global batch: the factor, every cell of the table, and what people are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.optim.schedule import lr_decision, lr_factor, rate_table
from paceline.recipe.parts import GroupPart, OptimizerPart, SchedulePart

LINEAR: dict[str, Any] = {"lr": 3e-5, "lr_scaling": "linear", "lr_scaling_base": 32}
SQRT: dict[str, Any] = {**LINEAR, "lr_scaling": "sqrt"}


@pytest.mark.parametrize(
    ("settings", "batch_size", "factor"),
    [
        ({}, 128, 1.0),
        (LINEAR, 128, 4.0),
        (LINEAR, 8, 0.25),
        (LINEAR, 32, 1.0),
        (SQRT, 128, 2.0),
        (SQRT, 8, 0.5),
        ({"lr_scaling": 1.5}, 128, 1.5),
        ({"lr_scaling": 1.5}, 7, 1.5),
    ],
)
def test_factor(settings: dict[str, Any], batch_size: int, factor: float) -> None:
    assert lr_factor(OptimizerPart(**settings), batch_size) == factor


def test_every_group_is_scaled_at_every_step_and_warms_up_to_the_scaled_rate() -> None:
    schedules = [
        SchedulePart(warmup=4),
        SchedulePart(type="constant", warmup=0),
        SchedulePart(type="cosine", floor=0.1),
    ]
    plain = rate_table([1e-3, 2e-2, 3e-4], schedules, 50)
    scaled = rate_table([1e-3, 2e-2, 3e-4], schedules, 50, 4.0)
    np.testing.assert_allclose(scaled, 4 * plain, rtol=1e-15)
    assert scaled[0, 0] == 0.0
    assert scaled[4, 0] == scaled[:, 0].max() == 4e-3


@pytest.mark.parametrize(
    ("settings", "batch_size", "value", "reason"),
    [
        (LINEAR, 128, "linear", "learning rate 3e-05 x 4 (linear: global batch 128 over 32)"),
        (SQRT, 64, "sqrt", "learning rate 3e-05 x 1.414 (sqrt: global batch 64 over 32)"),
        (LINEAR, 32, "linear", "learning rate 3e-05 x 1 (linear: global batch 32 over 32)"),
        ({"lr": 0.1, "lr_scaling": 2}, 64, "2.0", "learning rate 0.1 x 2 (a factor of your own)"),
        (
            {**LINEAR, "groups": (GroupPart(match="*head*", lr=1e-3),)},
            128,
            "linear",
            "learning rate 3e-05, and that of every group, x 4 (linear: global batch 128 over 32)",
        ),
    ],
)
def test_it_is_never_silent(settings: dict[str, Any], batch_size: int, value: str, reason: str) -> None:
    told = lr_decision(OptimizerPart(**settings), batch_size)
    assert told is not None
    assert (told.setting, told.value, told.reason) == ("optimizer.lr_scaling", value, reason)


def test_what_is_told_can_be_set_again_without_a_change() -> None:
    third = OptimizerPart(lr_scaling=1 / 3)
    told = lr_decision(third, 8)
    assert told is not None
    assert OptimizerPart(lr_scaling=float(told.value)) == third


def test_nothing_is_told_where_nothing_is_scaled() -> None:
    assert lr_decision(OptimizerPart(), 128) is None
