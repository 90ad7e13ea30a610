"""How likely each sample is to be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError


def sampling_weights(labels: NDArray[Any]) -> NDArray[np.float64]:
    """Weights [n] that add up to 1, by which samples of all classes are drawn equally often.

    Args:
        labels: [n] class indices, of the samples that are drawn from.

    Example:
        >>> sampler = torch.utils.data.WeightedRandomSampler(sampling_weights(labels), len(labels))
    """
    counts = np.bincount(labels)
    weights: NDArray[np.float64] = 1.0 / (counts[labels] * np.count_nonzero(counts))
    return weights


def check_sampler(sampler: str | None, kind: str) -> None:
    """Refuse to draw samples by classes that they do not have.

    Raises:
        RecipeError: names what does something of the kind.
    """
    if sampler is None or kind == "classification":
        return
    what, fix = f"loop.sampler = {sampler}: the data are for {kind}", "--set loop.sampler=null"
    if kind == "multi_label":
        why, more = "a sample has any number of labels, and no one class by which it is drawn", "task.class_weights"
        raise RecipeError(what, why, f"{fix} --set {more}=balanced weighs each label by itself")
    raise RecipeError(what, "a number has no classes", fix)
