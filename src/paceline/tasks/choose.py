"""From the recipe's words to a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.contract.errors import RecipeError, nearest
from paceline.recipe.parts import TaskPart
from paceline.recipe.rules import UNKNOWN, check_kind
from paceline.recipe.tasks import load_part

if TYPE_CHECKING:
    import torch

    from paceline.seams import Task

LOWER_IS_BETTER = frozenset({"loss", "mse", "mae"})


def task_for(
    kind: str,
    label_names: tuple[str, ...],
    part: TaskPart,
    *,
    class_weights: Sequence[float] = (),
    device: torch.device | None = None,
) -> Task:
    """The task of a data set whose labels are of ``kind``.

    Args:
        class_weights: what the recipe's come to, see ``tasks.class_weights``; empty: none.
        device: where steps compute, for what they are to find there; None: the CPU.

    Raises:
        RecipeError: an unknown metric, a loss that cannot be found, or what has no meaning for these labels.
    """

    def value_at(path: str) -> object:
        group, _, name = path.partition(".")
        return getattr(part, name) if group == "task" else UNKNOWN

    check_kind(kind, value_at)
    task: Task = load_part(kind, "objective")(label_names, part, class_weights, device)
    return task


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
