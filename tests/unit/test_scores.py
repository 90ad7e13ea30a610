"""Of the trained weights and their average the better one counts, the average where they are equal."""

from __future__ import annotations

import math

import pytest

from paceline.contract.records import EvaluationRecord
from paceline.run.scores import counted


def measured(accuracy: float, loss: float) -> EvaluationRecord:
    return EvaluationRecord(
        split="validation", step=1, epoch=0, samples=4, seconds=0.5, loss=loss, metrics={"accuracy": accuracy}
    )


@pytest.mark.parametrize(
    ("weights", "average", "of"),
    [(0.5, 0.5, "ema"), (0.75, 0.5, "weights"), (0.5, 0.75, "ema"), (0.5, math.nan, "weights"), (math.nan, 0.5, "ema")],
)
def test_the_better_of_both_counts(weights: float, average: float, of: str) -> None:
    found = counted(measured(weights, 1.0), measured(average, 2.0), "best", "accuracy")
    assert (found.of, found.loss, found.seconds) == (of, 2.0 if of == "ema" else 1.0, 1.0)
    assert {name: scores["loss"] for name, scores in found.scores.items()} == {"weights": 1.0, "ema": 2.0}
