"""Losses and metrics by their plain formulas, which ``paceline check`` compares a run's with; one room a task.

They share nothing with ``objective`` and ``meter``, so that a fault there is none here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.parts import TaskPart
from paceline.recipe.tasks import load_part

Bools = NDArray[np.bool_]


class PlainTask(ABC):
    """One kind of task as torch and its formulas have it."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, weight: Tensor | None, part: TaskPart) -> Tensor:
        """The mean loss of fp32 logits [S, C], never focal or a user's own; ``weight`` [C] of the classes."""

    @abstractmethod
    def scores(self, logits: NDArray[np.float64], labels: NDArray[Any]) -> dict[str, float]:
        """Metrics by name, as far as there is a plain formula; predictions by the usual threshold."""


def plain_task(kind: str) -> PlainTask:
    """A task by its name.

    Raises:
        KeyError: no task has this name.
    """
    plain: PlainTask = load_part(kind, "plain")
    return plain


def means_over_classes(predicted: Bools, labels: Bools) -> Mapping[str, float]:
    """Precision, recall and F1 as means over the classes; [S, C] each."""
    right = (predicted & labels).sum(0).astype(float)
    found, true = predicted.sum(0), labels.sum(0)
    return {
        "precision": float(_ratio(right, found).mean()),
        "recall": float(_ratio(right, true).mean()),
        "f1": float(_ratio(2 * right, found + true).mean()),
    }


def _ratio(one: NDArray[np.float64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(one, other, out=np.zeros_like(one), where=other > 0)
