"""Cross-entropy of each step from one class to the next (Frank and Hall, ECML 2001)."""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Meter, Task
from paceline.tasks.meter import SplitMeter
from paceline.tasks.metrics import check_names, reported
from tests.tasks.ordinal.meter import KNOWN, PlaceMeasures


@final
class Ordinal(Task):
    kind = "ordinal"
    best_metric = "accuracy"
    needs_scores = False

    def __init__(self, label_names: tuple[str, ...], metrics: tuple[str, ...]) -> None:
        self.label_names, self._metrics = label_names, metrics
        check_names(metrics, KNOWN)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return reported(self._metrics)

    @property
    def num_outputs(self) -> int:
        return len(self.label_names) - 1

    def count(self, labels: Any) -> int:
        return len(labels)

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        steps = torch.arange(logits.shape[-1], device=logits.device)
        above = (batch.labels[:, None] > steps).float()
        losses = F.binary_cross_entropy_with_logits(logits.float(), above, reduction="none").sum(-1)
        return (losses * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((self.probabilities(logits).argmax(-1) == batch.labels) * batch.weights).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        above = logits.float().sigmoid().cummin(-1).values
        ends = above.new_ones(len(above), 1), above.new_zeros(len(above), 1)
        return -torch.cat([ends[0], above, ends[1]], -1).diff(dim=-1)

    def logits(self, probabilities: Tensor) -> Tensor:
        return torch.logit(1 - probabilities.cumsum(-1)[:, :-1], eps=1e-7)

    def meter(self, device: torch.device) -> Meter:
        return SplitMeter(
            PlaceMeasures(self.label_names),
            self._metrics,
            device,
            loss_sum=self.loss_sum,
            divisor=lambda batch: batch.weights.sum(),
            scores=self.probabilities,
        )


def make_task(label_names: tuple[str, ...], part: TaskPart, class_weights: Sequence[float], device: Any) -> Task:
    return Ordinal(label_names, part.metrics if part.metrics is not None else KNOWN)


OBJECTIVE = make_task
