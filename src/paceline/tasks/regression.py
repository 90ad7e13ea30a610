"""A number a sample."""

from __future__ import annotations

from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import LossFunction
from paceline.tasks.meter import KNOWN, SplitMeter
from paceline.tasks.metrics import check_names, reported


@final
class Regression(Task):
    """Mean squared error of one output.

    Args:
        label_names: one name, of the target.
        metrics: names of metrics, or ``module:function``.
        loss: (values [S], targets [S]) -> losses [S] in place of the squared error.
    """

    kind = "regression"

    def __init__(
        self, label_names: tuple[str, ...], metrics: tuple[str, ...] | None = None, loss: LossFunction | None = None
    ) -> None:
        self.label_names = label_names
        self._metrics = metrics if metrics is not None else ("mse", "mae")
        self._loss = loss or _squared_error
        check_names(self._metrics, KNOWN[self.kind])

    def count(self, labels: NDArray[Any]) -> int:
        return len(labels)

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float().squeeze(-1), batch.labels) * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return batch.weights.new_zeros(())

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float()

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            self.kind,
            self._metrics,
            self.label_names,
            device,
            loss_sum=self.loss_sum,
            divisor=lambda batch: batch.weights.sum(),
            scores=lambda logits: logits.squeeze(-1),
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def best_metric(self) -> str:
        return "-loss"


def _squared_error(values: Tensor, targets: Tensor) -> Tensor:
    return (values - targets).square()
