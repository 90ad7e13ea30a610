"""Cross-entropy over the classes of a sample, weighted, smoothed or focal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.classification.meter import KNOWN, ClassMeasures
from paceline.tasks.losses import ClassWeights, LossFunction, class_loss
from paceline.tasks.meter import SplitMeter, needs_scores
from paceline.tasks.metrics import check_names, reported
from paceline.tasks.threshold import USUAL

CONFUSION_CLASSES = 100
"""Above this, a confusion matrix is no longer something to look at."""

_SMALLEST = torch.finfo(torch.float32).tiny


@final
class Classification(Task):
    """One of several classes, by the softmax of their logits.

    Args:
        label_names: class names in index order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S]) -> losses [S], weighted.
        weights: by which the losses are weighted, and divided.
        thresholds: the probability above which the second of two classes is predicted; empty: the likelier one.

    Raises:
        RecipeError: an unknown metric.
    """

    kind = "classification"

    def __init__(
        self,
        label_names: tuple[str, ...],
        metrics: tuple[str, ...],
        loss: LossFunction,
        *,
        weights: ClassWeights | None = None,
        thresholds: Sequence[float] = (),
    ) -> None:
        self.label_names, self.thresholds = label_names, tuple(thresholds)
        self._metrics, self._loss, self._weights = metrics, loss, weights
        check_names(metrics, KNOWN)

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

    def logits(self, probabilities: Tensor) -> Tensor:
        return probabilities.clamp_min(_SMALLEST).log()

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            ClassMeasures(
                self.label_names,
                decided=self._decided if self.thresholds else None,
                confusion=len(self.label_names) <= CONFUSION_CLASSES,
            ),
            self._metrics,
            device,
            loss_sum=self.loss_sum,
            divisor=self._divisor,
            scores=self.probabilities,
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

    @property
    def needs_scores(self) -> bool:
        return needs_scores(self._metrics, ClassMeasures)


def make_task(
    label_names: tuple[str, ...], part: TaskPart, class_weights: Sequence[float], device: torch.device | None
) -> Task:
    """Make the task of a recipe; see ``tasks.task_for``."""
    weights = ClassWeights(class_weights, device) if class_weights else None
    return Classification(
        label_names,
        part.metrics if part.metrics is not None else ("accuracy", "f1"),
        class_loss(part, weights, _cross_entropy),
        weights=weights,
        thresholds=_thresholds(label_names, part),
    )


OBJECTIVE = make_task


def _cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, weight, label_smoothing=smoothing, reduction="none")


def _thresholds(label_names: tuple[str, ...], part: TaskPart) -> tuple[float, ...]:
    """The threshold that is known before the training ends; empty: one half, or not tuned yet."""
    if part.threshold == USUAL:
        return ()
    if len(label_names) != 2:
        why = f"of {len(label_names)} classes the likeliest is predicted, and none has a threshold"
        raise RecipeError(f"task.threshold = {part.threshold}", why, "--set task.threshold=0.5")
    # as fp32 has it, so that metrics and predictions compare with the same number
    return () if part.threshold == "tuned" else (float(np.float32(part.threshold)),)
