"""Labels that are numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError, excerpt
from paceline.data.dataset import Origins
from paceline.data.labels import place
from paceline.data.sources.cells import Cell
from paceline.data.sources.label_column import Interpreted, LabelColumn, LabelProblem, not_finite
from paceline.data.sources.label_lists import one_label_a_row
from paceline.data.sources.notation import Numbers, are_bits, read_number
from paceline.data.task_rows import Constant, TaskRows, Values

REGRESSION_DISTINCT = 20
REGRESSION_SHARE = 0.2
"""Whole numbers are targets, not classes, when more than 20 differ and they are over 20 % of the rows."""

_QUANTILE_BINS, _SMALLEST_BIN = 10, 10
"""Bins that samples are split by, and the fewest rows in one."""


@final
class TargetRows(TaskRows):
    """A number a sample."""

    kind = "regression"
    has_classes = False
    one_class = False

    def takes(self, column: LabelColumn) -> bool:
        """Take numbers with fractions, and many different numbers."""
        _refuse_ambiguous(column)
        numbers = column.numbers
        if column.point == "auto" and numbers.point == "," and (joined := _joined(numbers.values)):
            raise _joined_or_decimal(joined, column)
        is_taken = _are_targets(column)
        if is_taken and are_bits(column.distinct):
            raise _bits(column)
        return is_taken

    def read(self, column: LabelColumn, *, is_guess: bool) -> Interpreted:
        if column.holds_lists:
            raise one_label_a_row(self.kind, column)
        _refuse_ambiguous(column)
        numbers, problems, targets = column.numbers, [], []
        for index, (cell, name) in enumerate(zip(column.plain, column.names, strict=True)):
            number = numbers.values.get(name) if isinstance(cell, str) else _number(cell)
            targets.append(math.nan if number is None else number)
            if number is None:
                fix = f"{_respell(name, numbers)}; if these are classes: --set task.type=classification"
                problems.append(LabelProblem(index, "mixed label types", name, "regression needs a number here", fix))
            elif not math.isfinite(number):
                problems.append(not_finite(index, name))
        why = f"it holds {len(numbers.values):,} different numbers"
        notices = (column.guessed(self.kind, why),) * is_guess
        if numbers.unusual:
            cell, value, other = numbers.unusual, numbers.values[numbers.unusual], "." if numbers.point == "," else ","
            notice = f"label column {column.name!r}: {excerpt(cell)} is read as the number {value:.10g}"
            otherwise = read_number(cell, other)
            shown = "" if otherwise in (None, value) else f" (--set data.decimal={other} reads {otherwise:.10g})"
            notices += (notice + shown,)
        return Interpreted(kind=self.kind, labels=targets, problems=tuple(problems), notices=notices)

    def classes_of(self, label: Any) -> tuple[str, ...]:
        return ()

    def encode(
        self, labels: Sequence[Any], rows: Mapping[str, int], num_labels: int, origins: Origins, column: str | None
    ) -> Values:
        with np.errstate(over="ignore"):  # what overflows is reported below, with its place
            values = np.asarray(labels, dtype=np.float64).astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                f"target {labels[wrong[0]]!r} is not a finite number in single precision",
                **place(origins, int(wrong[0])),
                column=column,
                fix="correct the row, or scale the targets",
            )
        return values

    def zeros(self, num_samples: int, num_labels: int) -> Values:
        return np.zeros(num_samples, dtype=np.float32)

    def strata(self, labels: Sequence[Any]) -> NDArray[np.int64]:
        """Quantile bins of equally many rows, at least ``_SMALLEST_BIN`` each; one bin for few rows."""
        values = np.asarray(labels, dtype=np.float64)
        bins = min(_QUANTILE_BINS, len(values) // _SMALLEST_BIN)
        if bins < 2:
            return np.zeros(len(values), dtype=np.int64)
        edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
        return np.searchsorted(edges, values, side="right").astype(np.int64)

    def label_counts(self, values: Values, num_labels: int) -> None:
        return None

    def constant(self, train: Values, held_out: Values, names: Sequence[str]) -> Constant:
        spread = float(np.mean((held_out - train.mean()) ** 2))
        return Constant("the mean of the training labels", "-mse", spread)


ROWS = TargetRows()


def _refuse_ambiguous(column: LabelColumn) -> None:
    cell = column.numbers.ambiguous
    if not cell or not column.are_mostly(column.numbers.values):
        return
    thousands, decimals = (f"{read_number(cell, point):g}" for point in (".", ","))
    raise DataError(
        f"{cell!r} is {thousands} or {decimals}",
        file=column.file,
        column=column.name,
        why="its comma may stand before thousands or before decimals, and no other label says which",
        fix=f"--set data.decimal=. where it is {thousands}, --set data.decimal=, where it is {decimals}; if these are"
        " classes: --set task.type=classification",
    )


def _joined(names: Collection[str]) -> str:
    """A label such as ``1,2`` where 1 and 2 are labels, too; empty: there is none, or they are steps of a half."""
    pairs = {name: name.split(",") for name in names if "," in name}
    if all(pair[1] in ("0", "5") for pair in pairs.values()):
        return ""
    are_labels = all(len(pair) == 2 and all(piece in names for piece in pair) for pair in pairs.values())
    return next(iter(pairs), "") if are_labels else ""


def _joined_or_decimal(cell: str, column: LabelColumn) -> DataError:
    one, other = cell.split(",")
    return DataError(
        f"{cell!r} is {read_number(cell, ','):g}, or labels {one} and {other}",
        file=column.file,
        column=column.name,
        why="on both sides of every comma stand other labels of the column",
        fix="--set data.label_separator=, for several labels a row, --set data.decimal=, for numbers",
    )


def _bits(column: LabelColumn) -> DataError:
    return DataError(
        "labels of zeros and ones alone are no numbers to learn",
        file=column.file,
        column=column.name,
        found=column.names[0],
        why="they look like a 0 or 1 for each class, with nothing between them",
        fix="write 0,1,1 and --set data.label_separator=, for several labels a row; if these are classes:"
        " --set task.type=classification; if numbers: --set task.type=regression",
    )


def _are_targets(column: LabelColumn) -> bool:
    """Whether a column that holds (almost) only numbers holds measurements rather than class numbers."""
    numbers = column.numbers
    finite = [number for number in numbers.values.values() if math.isfinite(number)]
    if not finite or not column.are_mostly(numbers.values):
        return False
    if numbers.mark or any(not number.is_integer() for number in finite):
        return True
    rows = sum(column.distinct[name] for name in numbers.values)
    different = len(set(finite))
    return different > REGRESSION_DISTINCT and different > REGRESSION_SHARE * rows


def _number(cell: Cell) -> float | None:
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def _respell(name: str, numbers: Numbers) -> str:
    """How to write a cell that is no number in the notation of the others."""
    other = next((number for point in ",." if (number := read_number(name, point)) is not None), None)
    if other is not None and not numbers.unusual:
        return f"write {other:.10g}"
    usual = next(iter(numbers.values), "1.5")
    return f"write a number, as the others are written ({excerpt(usual)}, for example)"
