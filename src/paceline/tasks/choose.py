"""From the recipe's words to a task."""

from __future__ import annotations

from paceline.recipe.parts import TaskPart
from paceline.seams import Task
from paceline.tasks.classification import Classification
from paceline.tasks.losses import user_loss
from paceline.tasks.multi_label import MultiLabel
from paceline.tasks.regression import Regression


def task_for(kind: str, label_names: tuple[str, ...], part: TaskPart) -> Task:
    """The task of a data set whose labels are of ``kind``.

    Raises:
        RecipeError: an unknown metric, or a loss that cannot be found.
    """
    loss = user_loss(part.loss) if part.loss else None
    if kind == "classification":
        return Classification(label_names, part.metrics, loss)
    if kind == "multi_label":
        return MultiLabel(label_names, part.metrics, loss)
    return Regression(label_names, part.metrics, loss)
