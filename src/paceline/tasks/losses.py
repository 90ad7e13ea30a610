"""What losses of several tasks have in common: weights of labels, and the form of a user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.contract.references import resolve, users_code

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
