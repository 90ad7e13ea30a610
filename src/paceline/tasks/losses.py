"""The losses of classes and labels, and the form of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.contract.references import resolve, users_code
from paceline.recipe.parts import TaskPart
from paceline.tasks.focal import focal_loss
from paceline.tasks.label_smoothing import smoothed

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> one loss a sample ([S], or [S, C] for multi-label): a sum or mean could not be weighted."""


@final
class ClassWeights:
    """A weight a label, on the host and on the device of the steps, so that no step waits for them.

    Args:
        weights: in the order of the labels.
        device: where steps compute.
    """

    def __init__(self, weights: Sequence[float], device: torch.device) -> None:
        self._host = np.array(weights, dtype=np.float32)
        self._tensor = torch.from_numpy(self._host).to(device)

    def on(self, device: torch.device) -> Tensor:
        """fp32 [C]."""
        return self._tensor.to(device)

    def sum_of(self, labels: np.ndarray) -> float:
        """The weights of class indices [n], added up."""
        return float(self._host[labels].sum(dtype=np.float64))


def loss_of(part: TaskPart, kind: str, weights: ClassWeights | None) -> LossFunction:
    """The loss of a recipe: one a sample or a label, weighted.

    Raises:
        RecipeError: a function that cannot be found.
    """
    if part.own_loss is not None:
        return user_loss(part.own_loss)
    gamma, smoothing, several = part.focal_gamma, part.label_smoothing, kind == "multi_label"

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        weight = None if weights is None else weights.on(logits.device)
        if part.loss == "focal":
            return focal_loss(logits, labels, gamma, weight)
        if several:
            targets = smoothed(labels, smoothing)
            return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        return F.cross_entropy(logits, labels, weight, label_smoothing=smoothing, reduction="none")

    return loss


def user_loss(reference: str) -> LossFunction:
    """The loss that a recipe names, checked to return one loss a sample.

    Raises:
        RecipeError: no such function, or (when first called) a result of another shape.
    """
    function = resolve(reference, "task.loss", ("logits", "labels"))

    def checked(logits: Tensor, labels: Tensor) -> Tensor:
        with users_code(f"task.loss = {reference}"):
            losses: Tensor = function(logits, labels)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
        if shape != tuple(labels.shape):
            returned = f"shape {shape}" if shape is not None else f"a {type(losses).__name__}"
            raise RecipeError(
                f"task.loss = {reference}",
                f"it returned {returned} for labels of shape {tuple(labels.shape)}",
                "return one loss a sample: reduction='none'",
            )
        return losses

    return checked
