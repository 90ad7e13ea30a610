"""Binary cross-entropy of each label of a sample, weighted, smoothed or focal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.label_smoothing import smoothed
from paceline.tasks.losses import ClassWeights, LossFunction, class_loss
from paceline.tasks.meter import SplitMeter, needs_scores
from paceline.tasks.metrics import check_names, reported
from paceline.tasks.multi_label.meter import KNOWN, LabelMeasures
from paceline.tasks.threshold import USUAL

_CLOSEST = torch.finfo(torch.float32).eps / 2
"""Probabilities are kept this far from 0 and 1 where their logits are taken."""


@final
class MultiLabel(Task):
    """Every label on its own, by the sigmoid of its logit; the loss is the mean over samples and labels.

    Args:
        label_names: label names in column order.
        metrics: names of metrics, or ``module:function``.
        loss: (logits [S, C], labels [S, C]) -> losses [S, C].
        thresholds: of each label; empty: one half.
    """

    kind = "multi_label"

    def __init__(
        self,
        label_names: tuple[str, ...],
        metrics: tuple[str, ...],
        loss: LossFunction,
        *,
        thresholds: Sequence[float] = (),
    ) -> None:
        self.label_names, self.thresholds = label_names, tuple(thresholds)
        self._metrics, self._loss = metrics, loss
        check_names(metrics, KNOWN)

    def count(self, labels: NDArray[Any]) -> int:
        return labels.size

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        return (self._loss(logits.float(), batch.labels) * batch.weights[:, None]).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return (((logits > 0) == (batch.labels > 0.5)) * batch.weights[:, None]).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def logits(self, probabilities: Tensor) -> Tensor:
        return torch.logit(probabilities, eps=_CLOSEST)

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            LabelMeasures(self.label_names, self._decided if self.thresholds else None),
            self._metrics,
            device,
            loss_sum=self.loss_sum,
            divisor=lambda batch: batch.weights.sum() * len(self.label_names),
            scores=self.probabilities,
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

    @property
    def needs_scores(self) -> bool:
        return needs_scores(self._metrics, LabelMeasures)


def make_task(
    label_names: tuple[str, ...], part: TaskPart, class_weights: Sequence[float], device: torch.device | None
) -> Task:
    """Make the task of a recipe; see ``tasks.task_for``."""
    weights = ClassWeights(class_weights, device) if class_weights else None
    metrics = part.metrics if part.metrics is not None else ("f1", "accuracy")
    loss = class_loss(part, weights, _binary_cross_entropy)
    return MultiLabel(label_names, metrics, loss, thresholds=_thresholds(label_names, part))


OBJECTIVE = make_task


def _binary_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    targets = smoothed(labels, smoothing)
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")


def _thresholds(label_names: tuple[str, ...], part: TaskPart) -> tuple[float, ...]:
    """The thresholds that are known before the training ends; empty: one half, or not tuned yet."""
    if part.threshold in (USUAL, "tuned"):
        return ()
    # as fp32 has it, so that metrics and predictions compare with the same number
    return (float(np.float32(part.threshold)),) * len(label_names)
