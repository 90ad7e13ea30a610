"""Binary cross-entropy as torch has it, and metrics of rows of 0 and 1."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.tasks.plain import PlainTask, means_over_classes


@final
class PlainLabels(PlainTask):
    """Any number of labels a sample."""

    def loss(self, logits: Tensor, labels: Tensor, weight: Tensor | None, part: TaskPart) -> Tensor:
        smoothing = part.label_smoothing
        targets = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight)

    def scores(self, logits: NDArray[np.float64], labels: NDArray[Any]) -> dict[str, float]:
        predicted, true = logits > 0, labels.astype(bool)
        same = predicted == true
        means = means_over_classes(predicted, true)
        return {"accuracy": float(same.mean()), "exact_match": float(same.all(-1).mean()), **means}


PLAIN = PlainLabels()
