"""One label a sample."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import LossFunction
from paceline.tasks.metrics import TorchMeter, check_names, classification_metrics, reported

CONFUSION_CLASSES = 100
"""Above this, a confusion matrix is no longer something to look at."""


@final
class Classification(Task):
    """Softmax cross-entropy over classes.

    Args:
        label_names: class names in index order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S]) -> losses [S] in place of cross-entropy.
    """

    kind = "classification"

    def __init__(
        self, label_names: tuple[str, ...], metrics: tuple[str, ...] | None = None, loss: LossFunction | None = None
    ) -> None:
        self.label_names = label_names
        self._metrics = metrics if metrics is not None else ("accuracy", "f1")
        self._loss = loss or _cross_entropy
        check_names(self._metrics, classification_metrics())

    def count(self, labels: NDArray[Any]) -> int:
        return len(labels)

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float(), batch.labels) * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((logits.argmax(-1) == batch.labels) * batch.weights).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1)

    def meter(self, device: torch.device) -> Meter:
        return TorchMeter(
            self._metrics,
            classification_metrics(),
            len(self.label_names),
            device,
            loss_sum=self.loss_sum,
            labels_per_sample=1,
            scores=self.probabilities,
            confusion=len(self.label_names) <= CONFUSION_CLASSES,
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def best_metric(self) -> str:
        return "accuracy" if "accuracy" in self._metrics else "-loss"


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")
