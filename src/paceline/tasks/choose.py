"""From the recipe's words to a task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.contract.errors import RecipeError, nearest
from paceline.recipe.catalogue.loss import LOSS
from paceline.recipe.entries import written
from paceline.recipe.parts import TaskPart
from paceline.seams import Task
from paceline.tasks.classification import Classification
from paceline.tasks.losses import ClassWeights, loss_of, user_loss
from paceline.tasks.multi_label import MultiLabel
from paceline.tasks.regression import Regression
from paceline.tasks.threshold import USUAL

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae"})


_CPU = torch.device("cpu")


def task_for(
    kind: str,
    label_names: tuple[str, ...],
    part: TaskPart,
    *,
    class_weights: Sequence[float] = (),
    device: torch.device = _CPU,
) -> Task:
    """The task of a data set whose labels are of ``kind``.

    Args:
        class_weights: what the recipe's come to, see ``tasks.class_weights``; empty: none.
        device: where steps compute, for what they are to find there.

    Raises:
        RecipeError: an unknown metric, a loss that cannot be found, or what has no meaning for these labels.
    """
    if kind == "regression":
        _refuse_of_classes(part)
        return Regression(label_names, part.metrics, user_loss(part.loss) if part.loss else None)
    weights = ClassWeights(class_weights, device) if class_weights else None
    loss, thresholds = loss_of(part, kind, weights), _thresholds(kind, label_names, part)
    if kind == "multi_label":
        return MultiLabel(label_names, part.metrics, loss, thresholds=thresholds)
    return Classification(label_names, part.metrics, loss, weights=weights, thresholds=thresholds)


def _refuse_of_classes(part: TaskPart) -> None:
    """Refuse, of numbers, what is of classes alone."""
    for entry in LOSS:
        group, _, name = entry.setting.partition(".")
        value = getattr(part, name) if group == "task" else entry.off
        if value == entry.name if entry.choice else value != entry.off:
            why = "the labels are numbers, and a number has no classes"
            raise RecipeError(f"{entry.setting} = {written(value)}", why, f"--set {entry.setting}={written(entry.off)}")


def _thresholds(kind: str, label_names: tuple[str, ...], part: TaskPart) -> tuple[float, ...]:
    """Those that are known before the training ends; empty: one half, for now where they are tuned."""
    if part.threshold == USUAL:
        return ()
    if kind == "classification" and len(label_names) != 2:
        why = f"of {len(label_names)} classes the likeliest is predicted, and none has a threshold"
        raise RecipeError(f"task.threshold = {part.threshold}", why, "--set task.threshold=0.5")
    if part.threshold == "tuned":
        return ()
    # as fp32 has it, so that metrics and predictions compare with the same number
    return (float(np.float32(part.threshold)),) * (len(label_names) if kind == "multi_label" else 1)


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
