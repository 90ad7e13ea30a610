"""What losses of several tasks have in common: weights of labels, and the form of a user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.contract.references import resolve, users_code
from paceline.recipe.parts import TaskPart
from paceline.tasks.focal import focal_loss

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> one loss a sample ([S], or [S, C] for multi-label): a sum or mean could not be weighted."""


@final
class ClassWeights:
    """A weight a label, on the host and on the device of the steps, so that no step waits for them.

    Args:
        weights: in the order of the labels.
        device: where steps compute; None: the CPU.
    """

    def __init__(self, weights: Sequence[float], device: torch.device | None = None) -> None:
        self._host = np.array(weights, dtype=np.float32)
        self._tensor = torch.from_numpy(self._host).to(device or torch.device("cpu"))

    def on(self, device: torch.device) -> Tensor:
        """fp32 [C]."""
        return self._tensor.to(device)

    def sum_of(self, labels: np.ndarray) -> float:
        """The weights of class indices [n], added up."""
        return float(self._host[labels].sum(dtype=np.float64))


def class_loss(
    part: TaskPart,
    weights: ClassWeights | None,
    cross_entropy: Callable[[Tensor, Tensor, Tensor | None, float], Tensor],
) -> LossFunction:
    """Return the loss of a task of classes: the user's own, focal, or the task's cross-entropy.

    Args:
        cross_entropy: (logits, labels, weights [C] or None, smoothing) -> one loss a label, none of them summed.
    """
    if part.own_loss is not None:
        return user_loss(part.own_loss)
    gamma, smoothing = part.focal_gamma, part.label_smoothing

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        weight = None if weights is None else weights.on(logits.device)
        if part.loss == "focal":
            return focal_loss(logits, labels, gamma, weight)
        return cross_entropy(logits, labels, weight, smoothing)

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
