"""The labels of a sample whose probabilities are above their thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from paceline.tasks.predictions import TaskPredictions, rounded
from paceline.tasks.threshold import USUAL


@final
class LabelPredictions(TaskPredictions):
    """Labels, and a probability for each."""

    def cells(
        self, label_names: Sequence[str], thresholds: Sequence[float], scores: Sequence[float], *, joined: bool
    ) -> list[Any]:
        each = zip(label_names, scores, thresholds or [USUAL] * len(label_names), strict=True)
        labels = [name for name, score, threshold in each if score > threshold]
        return ["|".join(labels) if joined else labels, *rounded(scores)]


PREDICTIONS = LabelPredictions()
