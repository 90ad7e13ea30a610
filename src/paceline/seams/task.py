"""What is learned, and how it is measured. Shapes as in ``batch``."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.seams.batch import Batch
from paceline.seams.world import World


class Meter(ABC):
    """Sums up predictions over a split; in bounded memory, but for metrics that need all scores."""

    @abstractmethod
    def update(self, logits: Tensor, batch: Batch) -> None:
        """Take in one batch; filler is left out."""

    @abstractmethod
    def merge(self, world: World, places: Sequence[int]) -> None:
        """Put together what the ranks took in; called by all of them, once, after the last batch.

        The first rank's meter is then, to the bit, that of one process which took in all batches in the order of the
        split; what the others' ``compute`` returns has no meaning.

        Args:
            places: of each batch taken in here, in the order of updates, its place among the split's batches.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Loss and metrics by name; NaN where one is undefined."""

    def notices(self) -> tuple[str, ...]:
        """Sentences on what ``compute`` returned: which metrics are undefined, or leave something out, and why."""
        return ()

    @abstractmethod
    def confusion(self) -> tuple[tuple[int, ...], ...] | None:
        """Counts [true][predicted], for single-label tasks of few classes."""


class Task(ABC):
    """What is learned. Losses are sums, so that any split of a batch adds up to the same gradient."""

    kind: str
    label_names: tuple[str, ...]
    thresholds: tuple[float, ...] = ()
    """Probabilities above which labels are predicted: one for each label that is decided by itself, or that of the
    second of two classes. None of them: the likeliest class, or above one half."""

    counts_right: bool = True
    """Whether a prediction is right or wrong, so that ``correct`` has a meaning."""

    @abstractmethod
    def count(self, labels: NDArray[Any]) -> int:
        """Number of labels of these samples."""

    def denominator(self, labels: NDArray[Any]) -> float:
        """What the loss of these samples is divided by; known on the host before the step.

        Their number of labels. Where classes have weights, the sum of the labels' weights, as torch's weighted mean has
        it: of the global batch, so that its split changes nothing.
        """
        return self.count(labels)

    @abstractmethod
    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """fp32 scalar: the weighted sum of the samples' losses; never a mean."""

    @abstractmethod
    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """fp32 scalar: number of right predictions, from the logits of the training forward pass."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 [S, C]: what ``predict`` reports; the value itself for regression, [S, 1]."""

    @abstractmethod
    def logits(self, probabilities: Tensor) -> Tensor:
        """Logits, in the number format of ``probabilities``, of which these are the ``probabilities``."""

    @abstractmethod
    def meter(self, device: torch.device) -> Meter:
        """A fresh sum of this task's metrics."""

    def judged_by(self, thresholds: Sequence[float]) -> Task:
        """The same task with these ``thresholds``, by which its metrics are measured from now on."""
        judged = copy.copy(self)
        judged.thresholds = tuple(thresholds)
        return judged

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """What ``meter`` reports, ``loss`` included."""

    @property
    @abstractmethod
    def best_metric(self) -> str:
        """The metric that tells the best model; a leading '-' means lower is better."""

    @property
    @abstractmethod
    def needs_scores(self) -> bool:
        """Whether a metric is computed of all scores of a split at once, which ``meter`` then keeps."""

    @property
    def num_outputs(self) -> int:
        """Width of the logits."""
        return max(1, len(self.label_names))
