"""The columns that ``predict`` adds to each row; the ``predictions`` of each task say what stands in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paceline.recipe.tasks import load_part


class TaskPredictions(ABC):
    """What one kind of task writes of a sample. The default columns are the prediction and a probability a label."""

    def columns(self, label_names: Sequence[str]) -> list[str]:
        """Names of the columns; the first is the prediction, and is what ``predict --text`` prints."""
        return ["prediction", *(f"probability of {name}" for name in label_names)]

    @abstractmethod
    def cells(
        self, label_names: Sequence[str], thresholds: Sequence[float], scores: Sequence[float], *, joined: bool
    ) -> list[Any]:
        """What stands in the columns for one sample.

        Args:
            thresholds: see ``Task``.
            scores: of the sample, from ``Task.probabilities``.
            joined: for a delimited file: several labels are one text.
        """


def predictions_of(kind: str) -> TaskPredictions:
    """What a task writes, by its name.

    Raises:
        KeyError: no task has this name.
    """
    predictions: TaskPredictions = load_part(kind, "predictions")
    return predictions


def rounded(scores: Sequence[float]) -> list[float]:
    """Probabilities as they are written."""
    return [round(score, 6) for score in scores]
