"""What a recipe's task asks of the labels of a data set."""

from __future__ import annotations

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.data.dataset import Dataset
from paceline.machine.facts import beyond_main_memory
from paceline.recipe.parts import TaskPart
from paceline.seams import Task
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


_COPIES_OF_SCORES = 2
"""What an evaluation holds at its end: scores batch by batch, and in the order of the split."""


def check_scores(part: TaskPart, dataset: Dataset, task: Task) -> None:
    """Refuse metrics of all scores of a split, [samples, labels], where the main memory cannot hold these.

    Raises:
        RecipeError: names the setting.
    """
    if not (task.needs_scores or part.threshold == "tuned"):
        return
    num_samples = max((len(ids) for split, ids in dataset.splits.items() if split != "train"), default=0)
    num_labels = len(dataset.label_names)
    if why := beyond_main_memory(4 * _COPIES_OF_SCORES * num_samples * num_labels):
        setting = f"task.metrics = {', '.join(part.metrics or ())}" if task.needs_scores else "task.threshold = tuned"
        raise RecipeError(
            f"{setting}: all scores of {num_samples:,} samples and {num_labels:,} labels are needed at once",
            why,
            "--set task.metrics=null" if task.needs_scores else "--set task.threshold=0.5",
        )


def check_threshold(part: TaskPart, dataset: Dataset) -> None:
    """Refuse to tune a threshold on a split that there is not.

    Raises:
        RecipeError: names two ways on.
    """
    if part.threshold == "tuned" and "validation" not in dataset.splits:
        why = "it is found on validation, and there is no validation split"
        fix = "--set data.splits.validation=0.1, or --set task.threshold=0.5"
        raise RecipeError("task.threshold = tuned", why, fix)
