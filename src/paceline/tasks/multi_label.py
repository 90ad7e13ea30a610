"""Any number of labels a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import LossFunction, loss_of
from paceline.tasks.meter import KNOWN, SplitMeter
from paceline.tasks.metrics import check_names, reported


@final
class MultiLabel(Task):
    """Every label on its own, by the sigmoid of its logit; the loss is the mean over samples and labels.

    Args:
        label_names: label names in column order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S, C]) -> losses [S, C]; None: binary cross-entropy.
        thresholds: of each label; empty: one half.
    """

    kind = "multi_label"

    def __init__(
        self,
        label_names: tuple[str, ...],
        metrics: tuple[str, ...] | None = None,
        loss: LossFunction | None = None,
        *,
        thresholds: Sequence[float] = (),
    ) -> None:
        self.label_names, self.thresholds = label_names, tuple(thresholds)
        self._metrics = metrics if metrics is not None else ("f1", "accuracy")
        self._loss = loss or loss_of(TaskPart(), self.kind, None)
        check_names(self._metrics, KNOWN[self.kind])

    def count(self, labels: NDArray[Any]) -> int:
        return labels.size

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float(), batch.labels) * batch.weights[:, None]).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return (((logits > 0) == (batch.labels > 0.5)) * batch.weights[:, None]).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            self.kind,
            self._metrics,
            self.label_names,
            device,
            loss_sum=self.loss_sum,
            divisor=lambda batch: batch.weights.sum() * len(self.label_names),
            scores=self.probabilities,
            decided=self._decided if self.thresholds else None,
        )

    def _decided(self, scores: Tensor) -> Tensor:
        """int64 [S, C] of 0 and 1."""
        return (scores > scores.new_tensor(self.thresholds)).long()

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def best_metric(self) -> str:
        return "f1" if "f1" in self._metrics else "-loss"
