"""The metrics of any number of labels a sample, from counts by label and from all scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

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
    exact_match,
    f1,
    precision,
    recall,
)

OF_COUNTS: Mapping[str, OfCounts] = {
    "accuracy": accuracy,
    "exact_match": exact_match,
    "f1": f1,
    "precision": precision,
    "recall": recall,
}
"""Accuracy is over all labels; f1, precision and recall are macro."""

KNOWN = (*OF_COUNTS, *OF_CLASS_SCORES)
"""Names of all metrics."""


@final
class LabelMeasures(Measures):
    """Right, predicted and true samples by label, and samples of which every label is right.

    Args:
        label_names: of the C labels.
        decided: scores [S, C] to 0 and 1 [S, C]; None: above one half.
    """

    of_scores: Mapping[str, OfScores] = OF_CLASS_SCORES

    def __init__(self, label_names: Sequence[str], decided: Callable[[Tensor], Tensor] | None = None) -> None:
        self.label_names, self._decided = label_names, decided
        self.num_counts = 3 * len(label_names) + 1

    def count(self, scores: Tensor, labels: Tensor) -> Counts:
        decided = scores if self._decided is None else self._decided(scores)
        predicted, true = decided > 0.5, labels > 0.5
        exact = (predicted == true).all(-1).sum()
        return Counts(
            torch.cat([(predicted & true).sum(0), predicted.sum(0), true.sum(0), exact.reshape(1)]),
        )

    def measured(self, name: str, counts: Tensor, sums: Sequence[float], samples: int) -> Measured:
        right, predicted, true = counts[:-1].view(3, -1)
        exact = int(counts[-1])
        return OF_COUNTS[name](ClassCounts(right, predicted, true, exact, samples, self.label_names, multi_label=True))
