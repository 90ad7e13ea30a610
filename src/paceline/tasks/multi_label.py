"""Any number of labels a sample."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import LossFunction
from paceline.tasks.metrics import TorchMeter, check_names, multi_label_metrics, reported


@final
class MultiLabel(Task):
    """Binary cross-entropy of every label on its own; the loss is the mean over samples and labels.

    Args:
        label_names: label names in column order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S, C]) -> losses [S, C] in place of binary cross-entropy.
    """

    kind = "multi_label"

    def __init__(
        self, label_names: tuple[str, ...], metrics: tuple[str, ...] | None = None, loss: LossFunction | None = None
    ) -> None:
        self.label_names = label_names
        self._metrics = metrics if metrics is not None else ("f1", "accuracy")
        self._loss = loss or _binary_cross_entropy
        check_names(self._metrics, multi_label_metrics())

    def count(self, labels: NDArray[Any]) -> int:
        return labels.size

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float(), batch.labels) * batch.weights[:, None]).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return (((logits > 0) == (batch.labels > 0.5)) * batch.weights[:, None]).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def meter(self, device: torch.device) -> Meter:
        return TorchMeter(
            self._metrics,
            multi_label_metrics(),
            len(self.label_names),
            device,
            loss_sum=self.loss_sum,
            labels_per_sample=len(self.label_names),
            scores=self.probabilities,
            confusion=False,
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def best_metric(self) -> str:
        return "f1" if "f1" in self._metrics else "-loss"


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
