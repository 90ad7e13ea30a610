"""The probability above which a label is predicted, chosen on samples that nothing was learned from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.seams import Batch, Meter, Task, World
from paceline.tasks.in_order import in_order

USUAL = 0.5
"""What is predicted is then the likelier label."""


def best_thresholds(scores: NDArray[np.float32], labels: NDArray[Any]) -> tuple[float, ...]:
    """The thresholds with the best F1 on these samples, one for every label that is decided by itself.

    Any number between two scores does the same: one half is taken where it is as good as any, else the middle.

    Args:
        scores: [n, C] probabilities.
        labels: [n, C] of 0 and 1: C thresholds, each with the best F1 of its label. Or [n] indices of two classes: one
            threshold, of the second, with the best mean of both classes' F1.

    Returns:
        Numbers that fp32 has; a label is predicted where its score is above.

    Example:
        >>> best_thresholds(np.array([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], np.float32), np.array([0, 1, 1]))
        (0.20000000298023224,)
    """
    if labels.ndim == 2:
        return tuple(_best(scores[:, c], labels[:, c] > 0.5, both=False) for c in range(scores.shape[1]))
    return (_best(scores[:, 1], labels == 1, both=True),)


def _best(scores: NDArray[np.float32], is_so: NDArray[np.bool_], *, both: bool) -> float:
    """The threshold with the best F1 of the samples that are so; ``both``: and of the others."""
    if not len(scores) or not np.isfinite(scores).all():
        return USUAL
    order = np.argsort(-scores, kind="stable")
    ordered, right = scores[order].astype(np.float64), np.concatenate([[0], np.cumsum(is_so[order])])
    taken, total, true = np.arange(len(scores) + 1), len(scores), int(is_so.sum())
    worth = _f1(right, taken, true)
    if both:
        worth = worth + _f1(total - taken - (true - right), total - taken, total - true)
    # of the k highest scores, the lowest has to be above the highest of the others
    upper, lower = np.concatenate([[np.inf], ordered]), np.concatenate([ordered, [0.0]])
    worth[upper <= lower] = -1.0
    best = worth >= worth.max() * (1 - 1e-12)
    if (best & (lower <= USUAL) & (upper > USUAL)).any():
        return USUAL
    at = int(best.argmax())
    middle = float(np.float32((min(upper[at], 1.0) + lower[at]) / 2))
    return middle if middle < upper[at] else float(lower[at])


def _f1(right: NDArray[np.int64], taken: NDArray[np.int64], true: int) -> NDArray[np.float64]:
    """F1 of so many right ones among those taken, where so many are true; 0 where there is neither."""
    return 2.0 * right / np.maximum(taken + true, 1)


def by_label(task: Task) -> dict[str, float]:
    """The task's thresholds by the labels that they are of."""
    return dict(zip(task.label_names[-len(task.thresholds) :], task.thresholds, strict=True)) if task.thresholds else {}


@final
class ThresholdMeter(Meter):
    """Keeps all scores of a split, in main memory, and finds the thresholds that suit it.

    Args:
        device: where ranks exchange them.
        scores: logits to probabilities [S, C].
    """

    def __init__(self, device: torch.device, scores: Callable[[Tensor], Tensor]) -> None:
        self._device, self._scores = device, scores
        self._kept: tuple[list[Tensor], list[Tensor]] = ([], [])

    def update(self, logits: Tensor, batch: Batch) -> None:
        real = batch.weights > 0
        for kept, more in zip(self._kept, (self._scores(logits), batch.labels), strict=True):
            kept.append(more[real].cpu())

    def merge(self, world: World, places: Sequence[int]) -> None:
        scores, labels = (in_order(world, places, kept, self._device) for kept in self._kept)
        self._kept = scores, labels

    def compute(self) -> dict[str, float]:
        """Thresholds in the order of labels, and no loss."""
        if not self._kept[0]:
            return {"loss": math.nan}
        scores, labels = (torch.cat(kept).numpy() for kept in self._kept)
        return {"loss": math.nan, **{f"{at}": found for at, found in enumerate(best_thresholds(scores, labels))}}

    def confusion(self) -> None:
        return None
