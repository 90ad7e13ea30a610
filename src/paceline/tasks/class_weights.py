"""A weight for every label: what a loss makes of samples whose labels are rare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError, excerpt, nearest


def class_weights(
    wish: Literal["balanced"] | Mapping[str, float], labels: NDArray[Any], label_names: Sequence[str]
) -> tuple[float, ...]:
    """The weights that are wished for, in the order of ``label_names``.

    Of one label a sample they are for ``torch.nn.functional.cross_entropy(weight=...)``, and ``balanced`` is
    scikit-learn's: n / (classes * count). Of several they are for ``binary_cross_entropy_with_logits(pos_weight=...)``,
    and ``balanced`` is the number of samples without a label over that of samples with it, as torch's page has it.

    Args:
        wish: ``balanced``, or label name -> weight.
        labels: of the training samples: [n] class indices, or [n, C] of 0 and 1.

    Raises:
        RecipeError: a name that is no label, a label without a weight, or one that no sample (or every one) has.

    Example:
        >>> class_weights("balanced", np.array([0, 0, 0, 1]), ("no", "yes"))
        (0.6666666666666666, 2.0)
    """
    if wish == "balanced":
        return _balanced(labels, label_names)
    for name in wish:
        if name not in label_names:
            what = f"task.class_weights: no label is called {excerpt(name)}"
            raise RecipeError(what, nearest(name, label_names), "name every label as the data write it")
    for name in label_names:
        if name not in wish:
            what = f"task.class_weights: no weight for label {excerpt(name)}"
            raise RecipeError(what, "a weight is given for every label", f"--set 'task.class_weights.{name}=1'")
    return tuple(float(wish[name]) for name in label_names)


def _balanced(labels: NDArray[Any], label_names: Sequence[str]) -> tuple[float, ...]:
    number, several = len(labels), labels.ndim == 2
    counts = labels.sum(0, dtype=np.float64) if several else np.bincount(labels, minlength=len(label_names))
    for name, count in zip(label_names, counts, strict=True):
        if count == 0 or (several and count == number):
            who = "no training sample" if count == 0 else "every training sample"
            why = f"{who} has label {excerpt(name)}, so that nothing can make up for it"
            fix = f"give weights by name: --set 'task.class_weights.{name}=1', and so on"
            raise RecipeError("task.class_weights = balanced", why, fix)
    weights = (number - counts) / counts if several else number / (len(counts) * counts)
    return tuple(weights.tolist())
