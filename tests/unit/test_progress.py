"""Where a run is: when its last weights are worse than they were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.data.order import OrderState
from paceline.run.progress import Progress, TrainSums

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


def test_a_skipped_step_adds_nothing_to_the_sums() -> None:
    sizes = {"samples": 4, "tokens": 9, "slots": 12, "correct": 3.0, "counted": 4}
    others = {"step": 1, "epoch": 0, "gradient_norm": 1.0, "learning_rates": (), "seconds": 0.1, "peak_bytes": None}
    step = StepRecord(loss=2.0, skipped=False, **sizes, **others)
    sums = TrainSums().plus(step).plus(replace(step, loss=math.inf, skipped=True)).plus(replace(step, loss=1.0))
    assert sums == TrainSums(loss=12.0, counted=8, correct=6.0)


def test_without_an_evaluation_nothing_fell() -> None:
    assert Progress(order=START).fall("accuracy") == ""
