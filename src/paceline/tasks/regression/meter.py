"""The metrics of a number a sample, from sums of errors and from all predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.tasks.meter import Counts, Measures
from paceline.tasks.metrics import OF_NUMBERS, ErrorSums, Measured, OfScores, OfSums, mae, mse, r2

OF_SUMS: Mapping[str, OfSums] = {"mse": mse, "mae": mae, "r2": r2}

KNOWN = (*OF_SUMS, *OF_NUMBERS)
"""Names of all metrics."""


@final
class ErrorMeasures(Measures):
    """The fields of ``ErrorSums``.

    Args:
        label_names: one name, of the target.
    """

    of_scores: Mapping[str, OfScores] = OF_NUMBERS
    num_counts = 0

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = label_names

    def count(self, scores: Tensor, labels: Tensor) -> Counts:
        away, exact = scores - labels, labels.double()
        samples = torch.tensor(len(labels), device=labels.device)
        sums = (samples, (away * away).sum(), away.abs().sum(), exact.sum(), (exact * exact).sum())
        return Counts(torch.zeros(0, device=labels.device, dtype=torch.int64), sums)

    def measured(self, name: str, counts: Tensor, sums: Sequence[float], samples: int) -> Measured:
        return OF_SUMS[name](ErrorSums(*sums))
