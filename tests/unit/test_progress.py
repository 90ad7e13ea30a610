"""Where a run is: when its last weights are worse than they were."""

from __future__ import annotations

import math

import pytest

from paceline.contract.records import EvaluationRecord
from paceline.data.order import OrderState
from paceline.run.progress import Progress

START = OrderState(seed=0, epoch=0, step=0, batch_size=8)


def progress(metric: str, best: float, *values: float) -> Progress:
    """Evaluations every ten steps, ``best`` at the first."""
    metrics = [{"loss": value} if metric == "-loss" else {"loss": 1.0, metric: value} for value in values]
    found = [
        EvaluationRecord(
            split="validation", step=10 * (i + 1), epoch=i, samples=4, seconds=0.1, loss=m["loss"], metrics=m
        )
        for i, m in enumerate(metrics)
    ]
    return Progress(order=START, step=10 * len(values), best=best, best_step=10, evaluations=tuple(found))


@pytest.mark.parametrize(
    ("metric", "best", "newest", "told"),
    [
        ("accuracy", 0.8884, 0.5, "validation accuracy went from 0.8884 at step 10 to 0.5 at step 20"),
        ("accuracy", 0.8884, 0.8352, ""),
        ("accuracy", 0.8884, 0.8884, ""),
        ("accuracy", 0.8884, math.nan, "validation accuracy went from 0.8884 at step 10 to nan at step 20"),
        ("-loss", -0.25, 0.69, "validation loss went from 0.25 at step 10 to 0.69 at step 20"),
        ("-loss", -0.25, 0.27, ""),
    ],
)
def test_a_sharp_fall_is_told(metric: str, best: float, newest: float, told: str) -> None:
    assert progress(metric, best, abs(best), newest).fall(metric) == told


def test_without_an_evaluation_nothing_fell() -> None:
    assert Progress(order=START).fall("accuracy") == ""
