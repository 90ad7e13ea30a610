"""What a recipe's task asks of the labels of a data set."""

from __future__ import annotations

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.data.dataset import Dataset
from paceline.recipe.parts import TaskPart
from paceline.tasks.class_weights import class_weights

MOST_TOLD = 10
"""Weights of classes that a decision names."""


def weights_of(part: TaskPart, dataset: Dataset) -> tuple[float, ...]:
    """A weight for every label, by the training split where the recipe leaves them to it; empty: none.

    Raises:
        RecipeError: they are not of these labels.
    """
    if part.class_weights is None:
        return ()
    return class_weights(part.class_weights, dataset.labels[dataset.splits["train"]], dataset.label_names)


def weights_told(part: TaskPart, dataset: Dataset) -> tuple[Decision, ...]:
    """What the training split makes of ``balanced``."""
    if part.class_weights != "balanced":
        return ()
    pairs = list(zip(dataset.label_names, weights_of(part, dataset), strict=True))
    told = ", ".join(f"{name} {weight:.4g}" for name, weight in pairs[:MOST_TOLD])
    more = f", and {len(pairs) - MOST_TOLD} more" if len(pairs) > MOST_TOLD else ""
    return (Decision(setting="task.class_weights", value="balanced", reason=f"by the training split, {told}{more}"),)


def check_threshold(part: TaskPart, dataset: Dataset) -> None:
    """Refuse to tune a threshold on a split that there is not.

    Raises:
        RecipeError: names two ways on.
    """
    if part.threshold == "tuned" and "validation" not in dataset.splits:
        why = "it is found on validation, and there is no validation split"
        fix = "--set data.splits.validation=0.1, or --set task.threshold=0.5"
        raise RecipeError("task.threshold = tuned", why, fix)
