"""The questions about labels that reading, splitting and describing data ask; the ``rows`` of each task answer them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.dataset import Origins
from paceline.recipe.tasks import load_part

if TYPE_CHECKING:
    from paceline.data.sources.label_column import Interpreted, LabelColumn

Values = NDArray[np.int64] | NDArray[np.float32]
"""Encoded labels: [n] class indices or targets, or [n, C] of 0 and 1."""


@dataclass(frozen=True)
class Constant:
    """The best prediction that does not look at the sample, as the training labels have it."""

    guess: str
    """The prediction, in words."""
    metric: str
    """By which it is compared; a leading '-' means lower is better."""
    score: float
    """Its value of that metric, without the sign."""
    rounding: float = 0.0
    """Difference up to which a model is no better."""


class TaskRows(ABC):
    """What the labels of one kind of task are. Needs no torch.

    The defaults are those of one class a sample; only ``read`` has none.
    """

    kind: str
    has_classes: bool = True
    """Whether labels name classes, so that a model knows some labels and not others."""
    one_class: bool = True
    """Whether each sample has exactly one class."""

    def takes(self, column: LabelColumn) -> bool:
        """Whether ``task.type: auto`` reads the column as this task; asked in the order of the catalogue.

        Raises:
            DataError: the column could be this task or another, and only its author knows.
        """
        return False

    @abstractmethod
    def read(self, column: LabelColumn, *, is_guess: bool) -> Interpreted:
        """Turn the cells of all rows into labels, and say which rows do not fit.

        Args:
            is_guess: ``auto`` chose the task, which a notice should say.

        Raises:
            DataError: the column holds no labels of this task.
        """

    def classes_of(self, label: Any) -> tuple[str, ...]:
        """Return the names of a label's classes."""
        return (str(label),)

    def encode(
        self, labels: Sequence[Any], rows: Mapping[str, int], num_labels: int, origins: Origins, column: str | None
    ) -> Values:
        """Encode labels, one entry a sample.

        Args:
            rows: class name -> index; empty without classes.
            num_labels: of the task; indices are below it.
            origins, column: where the labels come from, for errors.

        Raises:
            DataError: a label that has no number, or more labels than fit into memory.
        """
        return np.array([rows[label] for label in labels], dtype=np.int64)

    def zeros(self, num_samples: int, num_labels: int) -> Values:
        """Encoded labels of samples without any."""
        return np.zeros(num_samples, dtype=np.int64)

    def strata(self, labels: Sequence[Any]) -> NDArray[np.int64]:
        """Number [n] the groups of samples of which each split takes its share."""
        return number_distinct(labels)

    def label_counts(self, values: Values, num_labels: int) -> NDArray[np.number[Any]] | None:
        """Count the samples [C] with each label; None without classes."""
        return np.bincount(values, minlength=num_labels)

    def constant(self, train: Values, held_out: Values, names: Sequence[str]) -> Constant | None:
        """The constant prediction that a model has to beat on ``held_out``; None: there is none."""
        counts = np.bincount(train, minlength=len(names))
        if np.count_nonzero(counts) < 2:
            return None  # asked for: data of a single class
        most = int(counts.argmax())
        guess = f"{names[most]!r}, the most frequent training label"
        return Constant(guess, "accuracy", float(np.mean(held_out == most)), rounding=1e-6)  # metrics are fp32


def rows_of(kind: str) -> TaskRows:
    """The labels of a task by its name; its room is loaded when it is first asked for.

    Raises:
        KeyError: no task has this name.
    """
    rows: TaskRows = load_part(kind, "rows")
    return rows


def number_distinct(labels: Sequence[object]) -> NDArray[np.int64]:
    """Number [n] equal labels alike, in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
