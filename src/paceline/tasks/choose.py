"""From the recipe's words to a task."""

from __future__ import annotations

from paceline.contract.errors import RecipeError, nearest
from paceline.recipe.parts import TaskPart
from paceline.seams import Task
from paceline.tasks.classification import Classification
from paceline.tasks.losses import user_loss
from paceline.tasks.multi_label import MultiLabel
from paceline.tasks.regression import Regression

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae"})


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


def best_metric(task: Task, wanted: str) -> str:
    """The metric that tells the best model: ``wanted``, or the task's own for ``auto``.

    Raises:
        RecipeError: it is not measured, or its sign would make the worst model the best.
    """
    if wanted == "auto":
        return task.best_metric
    name = wanted.removeprefix("-")
    setting = f"loop.best_metric = {wanted}"
    if name not in task.metric_names:
        fix = f"--set loop.best_metric=NAME, or measure it: --set task.metrics=[...,{name}]"
        raise RecipeError(f"{setting}: not measured", nearest(name, task.metric_names), fix)
    if name in LOWER_IS_BETTER and name == wanted:
        raise RecipeError(setting, f"a lower {name} is better", f"--set loop.best_metric=-{name}")
    return wanted
