"""One label a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import ClassWeights, LossFunction, loss_of
from paceline.tasks.meter import KNOWN, SplitMeter
from paceline.tasks.metrics import check_names, reported

CONFUSION_CLASSES = 100
"""Above this, a confusion matrix is no longer something to look at."""


@final
class Classification(Task):
    """One of several classes, by the softmax of their logits.

    Args:
        label_names: class names in index order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S]) -> losses [S], weighted; None: cross-entropy.
        weights: by which the losses are weighted, and divided.
        thresholds: the probability above which the second of two classes is predicted; empty: the likelier one.

    Raises:
        RecipeError: an unknown metric, or a threshold for classes that are not two.
    """

    kind = "classification"

    def __init__(
        self,
        label_names: tuple[str, ...],
        metrics: tuple[str, ...] | None = None,
        loss: LossFunction | None = None,
        *,
        weights: ClassWeights | None = None,
        thresholds: Sequence[float] = (),
    ) -> None:
        self.label_names, self.thresholds = label_names, tuple(thresholds)
        self._metrics = metrics if metrics is not None else ("accuracy", "f1")
        self._loss, self._weights = loss or loss_of(TaskPart(), self.kind, None), weights
        check_names(self._metrics, KNOWN[self.kind])

    def count(self, labels: NDArray[Any]) -> int:
        return len(labels)

    def denominator(self, labels: NDArray[Any]) -> float:
        return self.count(labels) if self._weights is None else self._weights.sum_of(labels)

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float(), batch.labels) * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((logits.argmax(-1) == batch.labels) * batch.weights).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1)

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            self.kind,
            self._metrics,
            self.label_names,
            device,
            loss_sum=self.loss_sum,
            divisor=self._divisor,
            scores=self.probabilities,
            decided=self._decided if self.thresholds else None,
            confusion=len(self.label_names) <= CONFUSION_CLASSES,
        )

    def _divisor(self, batch: Batch) -> Tensor:
        """Scalar: what ``loss_sum`` is divided by."""
        if self._weights is None:
            return batch.weights.sum()
        return (self._weights.on(batch.labels.device)[batch.labels] * batch.weights).sum()

    def _decided(self, scores: Tensor) -> Tensor:
        """int64 [S]: the class that is predicted of two."""
        return (scores[:, 1] > self.thresholds[0]).long()

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def best_metric(self) -> str:
        return "accuracy" if "accuracy" in self._metrics else "-loss"
