"""The metrics of one label a sample, from counts by class and from all scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast, final

import torch
from torch import Tensor

from paceline.tasks.meter import Counts, Measures
from paceline.tasks.metrics import (
    OF_CLASS_SCORES,
    ClassCounts,
    Measured,
    OfCounts,
    OfScores,
    accuracy,
    f1,
    mcc,
    precision,
    recall,
)

OF_COUNTS: Mapping[str, OfCounts] = {
    "accuracy": accuracy,
    "f1": f1,
    "precision": precision,
    "recall": recall,
    "mcc": mcc,
}
"""Accuracy is micro; f1, precision and recall are macro."""

KNOWN = (*OF_COUNTS, *OF_CLASS_SCORES)
"""Names of all metrics."""


@final
class ClassMeasures(Measures):
    """Right, predicted and true samples by class, and the confusion matrix.

    Args:
        label_names: of the C classes.
        decided: scores [S, C] to predicted classes [S]; None: the likeliest class.
        confusion: count [true][predicted] too.
    """

    of_scores: Mapping[str, OfScores] = OF_CLASS_SCORES

    def __init__(
        self, label_names: Sequence[str], *, decided: Callable[[Tensor], Tensor] | None = None, confusion: bool = False
    ) -> None:
        self.label_names, self._decided, self._classes = label_names, decided, len(label_names)
        self._matrix = self._classes**2 if confusion else 0
        self.num_counts = 3 * self._classes + 1 + self._matrix

    def count(self, scores: Tensor, labels: Tensor) -> Counts:
        predicted = scores.argmax(-1) if self._decided is None else self._decided(scores)
        is_right = predicted == labels
        by_class = [torch.bincount(each, minlength=self._classes) for each in (labels[is_right], predicted, labels)]
        pairs = labels * self._classes + predicted
        matrix = [torch.bincount(pairs, minlength=self._matrix)] if self._matrix else []
        return Counts(torch.cat([*by_class, is_right.sum().reshape(1), *matrix]))

    def measured(self, name: str, counts: Tensor, sums: Sequence[float], samples: int) -> Measured:
        right, predicted, true = counts[: 3 * self._classes].view(3, -1)
        exact = int(counts[3 * self._classes])
        return OF_COUNTS[name](ClassCounts(right, predicted, true, exact, samples, self.label_names, multi_label=False))

    def confusion(self, counts: Tensor) -> tuple[tuple[int, ...], ...] | None:
        if not self._matrix:
            return None
        matrix = counts[-self._matrix :].view(self._classes, self._classes)
        return tuple(tuple(cast("list[int]", row)) for row in matrix.tolist())
