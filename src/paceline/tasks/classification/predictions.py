"""The likeliest class of a sample, or the second of two above its threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from paceline.tasks.predictions import TaskPredictions, rounded


@final
class ClassPredictions(TaskPredictions):
    """A class, and a probability for each."""

    def cells(
        self, label_names: Sequence[str], thresholds: Sequence[float], scores: Sequence[float], *, joined: bool
    ) -> list[Any]:
        if thresholds:
            label = label_names[int(scores[1] > thresholds[0])]
        else:
            label = label_names[max(range(len(scores)), key=scores.__getitem__)]
        return [label, *rounded(scores)]


PREDICTIONS = ClassPredictions()
