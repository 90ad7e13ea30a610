"""Cross-entropy as torch has it, and metrics of one-hot rows."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.tasks.plain import PlainTask, means_over_classes


@final
class PlainClasses(PlainTask):
    """One class a sample."""

    def loss(self, logits: Tensor, labels: Tensor, weight: Tensor | None, part: TaskPart) -> Tensor:
        return F.cross_entropy(logits, labels, weight, label_smoothing=part.label_smoothing)

    def scores(self, logits: NDArray[np.float64], labels: NDArray[Any]) -> dict[str, float]:
        predicted, classes = logits.argmax(-1), logits.shape[-1]
        one_hot = [np.eye(classes, dtype=bool)[each] for each in (predicted, labels.astype(np.int64))]
        # a class that is neither there nor predicted counts for nothing
        present = [row for row in range(classes) if one_hot[0][:, row].any() or one_hot[1][:, row].any()]
        means = means_over_classes(*(each[:, present] for each in one_hot))
        return {"accuracy": float((predicted == labels).mean()), **means}


PLAIN = PlainClasses()
