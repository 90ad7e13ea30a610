"""The number that a model puts out for a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from paceline.tasks.predictions import TaskPredictions


@final
class TargetPredictions(TaskPredictions):
    """A number, and no probability."""

    def columns(self, label_names: Sequence[str]) -> list[str]:
        return ["prediction"]

    def cells(
        self, label_names: Sequence[str], thresholds: Sequence[float], scores: Sequence[float], *, joined: bool
    ) -> list[Any]:
        return [scores[0]]


PREDICTIONS = TargetPredictions()
