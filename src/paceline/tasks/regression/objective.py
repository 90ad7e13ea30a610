"""The squared error of one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.losses import LossFunction, user_loss
from paceline.tasks.meter import SplitMeter, needs_scores
from paceline.tasks.metrics import check_names, reported
from paceline.tasks.regression.meter import KNOWN, ErrorMeasures


@final
class Regression(Task):
    """Mean squared error of one output.

    Args:
        label_names: one name, of the target.
        metrics: names of metrics, or ``module:function``.
        loss: (values [S], targets [S]) -> losses [S].
    """

    kind = "regression"
    counts_right = False

    def __init__(self, label_names: tuple[str, ...], metrics: tuple[str, ...], loss: LossFunction) -> None:
        self.label_names, self._metrics, self._loss = label_names, metrics, loss
        check_names(metrics, KNOWN)

    def count(self, labels: NDArray[Any]) -> int:
        return len(labels)

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float().squeeze(-1), batch.labels) * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return batch.weights.new_zeros(())

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float()

    def logits(self, probabilities: Tensor) -> Tensor:
        return probabilities

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            ErrorMeasures(self.label_names),
            self._metrics,
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

    @property
    def needs_scores(self) -> bool:
        return needs_scores(self._metrics, ErrorMeasures)


def make_task(
    label_names: tuple[str, ...], part: TaskPart, class_weights: Sequence[float], device: torch.device | None
) -> Task:
    """Make the task of a recipe; see ``tasks.task_for``."""
    metrics = part.metrics if part.metrics is not None else ("mse", "mae")
    return Regression(label_names, metrics, user_loss(part.loss) if part.loss else _squared_error)


OBJECTIVE = make_task


def _squared_error(values: Tensor, targets: Tensor) -> Tensor:
    return (values - targets).square()
