"""Labels that name any number of classes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError
from paceline.data.dataset import Origins
from paceline.data.sources.label_column import Interpreted, LabelColumn
from paceline.data.sources.label_lists import read_lists, refuse_one_indicator_each
from paceline.data.task_rows import Constant, TaskRows, Values, number_distinct
from paceline.machine.facts import beyond_main_memory

_SMALLEST_STRATUM = 10
"""Combinations of labels that fewer rows have are split together."""


@final
class LabelRows(TaskRows):
    """Any number of classes a sample; its labels are tuples of their names."""

    kind = "multi_label"
    one_class = False

    def takes(self, column: LabelColumn) -> bool:
        """Take lists."""
        if column.holds_lists:
            refuse_one_indicator_each(column)
        return column.holds_lists

    def read(self, column: LabelColumn, *, is_guess: bool) -> Interpreted:
        if not column.holds_lists:
            raise DataError(
                "task.type = 'multi_label' needs several labels a row",
                file=column.file,
                column=column.name,
                why=f"most cells hold {column.family}",
                fix="--set data.label_separator=';' (what separates them), or a JSON list in a .jsonl file, or one 0/1"
                " column a class: --set data.label=[A,B,C]",
            )
        lists = read_lists(column)
        notices = (column.guessed(self.kind, "it holds lists"),) * is_guess + lists.notices
        return Interpreted(
            kind=self.kind,
            labels=lists.labels,
            problems=lists.problems,
            notices=notices,
            num_places=lists.num_places,
        )

    def classes_of(self, label: Any) -> tuple[str, ...]:
        return tuple(label)

    def encode(
        self, labels: Sequence[Any], rows: Mapping[str, int], num_labels: int, origins: Origins, column: str | None
    ) -> Values:
        if why := beyond_main_memory(4 * len(labels) * num_labels):
            raise DataError(
                f"{len(labels):,} samples with {num_labels:,} labels",
                why=why,
                fix="leave rare labels out, or give fewer rows",
            )
        values = np.zeros((len(labels), num_labels), dtype=np.float32)
        for sample, label in enumerate(labels):
            values[sample, [rows[name] for name in label]] = 1
        return values

    def zeros(self, num_samples: int, num_labels: int) -> Values:
        return np.zeros((num_samples, num_labels), dtype=np.float32)

    def strata(self, labels: Sequence[Any]) -> NDArray[np.int64]:
        """Combinations of labels; rare ones are one stratum."""
        strata = number_distinct([tuple(sorted(names)) for names in labels])
        counts = np.bincount(strata)
        strata[counts[strata] < _SMALLEST_STRATUM] = len(counts)
        return strata

    def label_counts(self, values: Values, num_labels: int) -> NDArray[np.number[Any]]:
        counts: NDArray[np.number[Any]] = values.sum(0)
        return counts

    def constant(self, train: Values, held_out: Values, names: Sequence[str]) -> Constant:
        scored = float(np.mean(held_out == (train.mean(0) > 0.5)))
        return Constant("what is more frequent of each label", "accuracy", scored, rounding=1e-6)  # metrics are fp32


ROWS = LabelRows()
