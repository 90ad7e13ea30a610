"""Accuracy, and how many places a prediction is away."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from paceline.tasks.meter import Counts, Measures
from paceline.tasks.metrics import Measured

KNOWN = ("accuracy", "places_away")


@final
class PlaceMeasures(Measures):
    num_counts = 2

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = label_names

    def count(self, scores: Tensor, labels: Tensor) -> Counts:
        predicted = scores.argmax(-1)
        return Counts(torch.stack([(predicted == labels).sum(), (predicted - labels).abs().sum()]))

    def measured(self, name: str, counts: Tensor, sums: Sequence[float], samples: int) -> Measured:
        return Measured(int(counts[KNOWN.index(name)]) / samples)
