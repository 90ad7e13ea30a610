"""The questions about a model's head that loading, saving and fitting ask; the ``head`` of each task answers them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError
from paceline.recipe.tasks import load_part, task_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Row = tuple[NDArray[np.float64], float]
"""Weight [d] and bias of one output of a linear layer."""

NEVER = -1e4
"""Logit of a label that no sample has."""


class TaskHead(ABC):
    """The head of one kind of task."""

    problem_type: str
    """In transformers' words."""
    rows_are_classes: bool = True
    """Whether the rows of a head stand for classes, which a checkpoint may name."""

    def outputs(self, label_names: Sequence[str]) -> tuple[str, ...]:
        """Names of the outputs, one a row of the head; saved as ``id2label``."""
        return tuple(label_names)

    def auto_class(self, modality: str) -> Any:
        """The class of transformers that makes a model with this head of a configuration."""
        from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

        return AutoModelForImageClassification if modality == "image" else AutoModelForSequenceClassification

    def written_problem(self, num_outputs: int) -> str | None:
        """``problem_type`` of a configuration with so many outputs."""
        return self.problem_type

    def claims(self, config: PretrainedConfig) -> bool:
        """Whether a checkpoint that names no problem is of this task; asked in the order of the catalogue."""
        return False

    def num_thresholds(self, num_labels: int) -> int:
        """Number of thresholds that predictions of so many labels may have."""
        return 0

    def solve(
        self, features: NDArray[np.float64], labels: NDArray[Any], classifier: str, num_outputs: int, bias: bool
    ) -> list[Row]:
        """Fit the rows of a linear head; arguments as ``models.features.fit_final_linear``, features standardised.

        Raises:
            RecipeError: the task fits no head, which is the default.
        """
        raise RecipeError("model.train = features", "this task fits no head to features", "--set model.train=head")


def head_of(kind: str) -> TaskHead:
    """The head of a task by its name; its room is loaded when it is first asked for.

    Raises:
        KeyError: no task has this name.
    """
    head: TaskHead = load_part(kind, "head")
    return head


def kind_of(config: PretrainedConfig) -> str:
    """The task that a checkpoint of transformers was trained for."""
    heads = {name: head_of(name) for name in task_names()}
    named = (name for name, head in heads.items() if head.problem_type == config.problem_type)
    return next(named, None) or next(name for name, head in heads.items() if head.claims(config))


def linear_classifier(classifier: str, bias: bool) -> Any:
    """scikit-learn's ``logistic`` or ``svm``, with its own defaults."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    if classifier == "svm":
        return LinearSVC(fit_intercept=bias, random_state=0, max_iter=20_000)
    return LogisticRegression(fit_intercept=bias, max_iter=5_000)
