"""The mean squared error as torch has it, and errors of numbers."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.tasks.plain import PlainTask


@final
class PlainTargets(PlainTask):
    """A number a sample."""

    def loss(self, logits: Tensor, labels: Tensor, weight: Tensor | None, part: TaskPart) -> Tensor:
        return F.mse_loss(logits.squeeze(-1), labels.float())

    def scores(self, logits: NDArray[np.float64], labels: NDArray[Any]) -> dict[str, float]:
        apart = logits.squeeze(-1) - labels
        return {"mse": float((apart**2).mean()), "mae": float(np.abs(apart).mean())}


PLAIN = PlainTargets()
