"""Label cells: what one row says, and what the whole column turns out to be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.errors import DataError, excerpt

Cell = str | bool | int | float | tuple[str, ...]
"""A label as one row gives it, before it is known what the column holds."""

Labels = list[str] | list[float] | list[tuple[str, ...]]

REGRESSION_DISTINCT = 20
REGRESSION_SHARE = 0.2
"""Whole numbers are targets, not classes, when more than 20 differ and they are over 20 % of the rows."""

_MOST_CLASSES, _FEW_ROWS = 0.5, 20
"""From 20 rows on, more words than half of them are no classes: another column was picked by mistake."""

_MOSTLY = 0.9
"""When this share of a text column's labels are numbers, the others are taken for mistakes."""


@dataclass(frozen=True)
class LabelProblem:
    """A row whose label does not fit the column."""

    index: int
    problem: str
    found: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Interpreted:
    """A label column as a whole; ``labels`` has an entry for every row, to be ignored where there is a problem."""

    kind: str
    """``classification``, ``multi_label`` or ``regression``."""
    labels: Labels
    problems: tuple[LabelProblem, ...] = ()
    notices: tuple[str, ...] = field(default=())


def label_cell(value: object, separator: str | None) -> Cell | None:
    """One label cell in plain Python; None when it is empty.

    Text is stripped. A list, or text cut at ``separator``, is the set of a row's labels (which may be empty), in
    order and without repeats.

    Raises:
        TypeError: the value is no text, number, boolean or list of these.
    """
    if isinstance(value, str):
        value = value.strip()
        if separator is None:
            return value or None
        return tuple(dict.fromkeys(part.strip() for part in value.split(separator) if part.strip()))
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()  # numpy scalars and arrays
    if isinstance(value, list | tuple):
        names = [_name(item) if isinstance(item, str | bool | int | float) else "" for item in value]
        if not all(name.strip() for name in names):
            raise TypeError("a list of labels holds something that is no name")
        return tuple(dict.fromkeys(name.strip() for name in names))
    if value is None:
        return None if separator is None else ()
    if isinstance(value, bool | int | float):
        return value if separator is None else (_name(value),)
    raise TypeError(f"a label is text, a number or a list of names, not {type(value).__name__}")


def blanks_around(value: object, separator: str | None) -> str | None:
    """The first name in a label cell that ``label_cell`` strips, as it is written; None: it strips none.

    Blanks beside ``separator`` are usual, and are not meant.
    """
    if isinstance(value, str):
        names: Sequence[object] = (value,) if separator is None else ()
    else:
        names = value if isinstance(value, list | tuple) else ()
    return next((name for name in names if isinstance(name, str) and name != name.strip()), None)


def indicator_cell(values: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    """The names of the 0/1 columns that are 1 in this row.

    Raises:
        DataError: a cell is neither 0 nor 1 (or false and true); without a place but with its column.
    """
    chosen = []
    for column in columns:
        value = values[column]
        text = str(value).strip().lower()
        if text in ("1", "1.0", "true"):
            chosen.append(column)
        elif text not in ("0", "0.0", "false"):
            raise DataError(
                "neither 0 nor 1",
                column=column,
                found=str(value),
                why="several label columns say of each class whether the row belongs to it",
                fix="write 0 or 1, or name a single label column: --set data.label=COLUMN",
            )
    return tuple(chosen)


def interpret(cells: Sequence[Cell], task: str, column: str, file: str = "") -> Interpreted:
    """What a column of labels holds, and which rows do not fit.

    Args:
        cells: one for each row; not empty.
        task: ``auto``, ``classification``, ``multi_label`` or ``regression``.
        column: its name, for messages.
        file: where it is, for messages.

    Raises:
        DataError: the labels cannot be of the task that was asked for, or are hardly labels at all.
    """
    families = Counter(map(_family, cells))
    main = families.most_common(1)[0][0]
    if task in ("multi_label", "auto") and main == "a list":
        notices = (_guess("multi_label", column, "it holds lists"),) if task == "auto" else ()
        return Interpreted(
            kind="multi_label",
            labels=[cell if isinstance(cell, tuple) else () for cell in cells],
            problems=tuple(_mixed(cells, main)),
            notices=notices,
        )
    if task == "multi_label":
        raise DataError(
            "task.type = 'multi_label' needs several labels a row",
            file=file,
            column=column,
            why=f"most cells hold {main}",
            fix="--set data.label_separator=';' (what separates them), or a JSON list in a .jsonl file, or one 0/1"
            " column a class: --set data.label=[A,B,C]",
        )
    if main == "a list":
        raise DataError(
            f"task.type = {task!r} takes one label a row",
            file=file,
            column=column,
            why="most cells hold a list",
            fix="--set task.type=multi_label, or without data.label_separator if it is set",
        )
    names = [_name(cell) for cell in cells]
    distinct = Counter(names)
    numbers = {name: number for name in distinct if (number := to_number(name)) is not None}
    if task == "regression":
        return _targets(cells, names, numbers, ())
    if task == "auto" and _are_targets(distinct, numbers):
        why = f"it holds {len(numbers):,} different numbers"
        return _targets(cells, names, numbers, (_guess("regression", column, why),))
    words = len(distinct) - len(numbers)
    if task == "auto" and len(cells) >= _FEW_ROWS and words > _MOST_CLASSES * len(cells):
        raise DataError(
            f"{len(distinct):,} different labels in {len(cells):,} rows",
            file=file,
            column=column,
            found=names[0],
            why="a class needs several rows to be learned from; this looks like texts or names of rows",
            fix="--set data.label=COLUMN names another column; if these are classes: --set task.type=classification",
        )
    return _classes(cells, names, numbers, main, task, column)


def to_number(text: str) -> float | None:
    """The number that a cell spells (NaN and infinities included), or None."""
    if "_" in text:  # float() takes Python's 1_000, a name for everybody else
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _name(value: str | bool | int | float | tuple[str, ...]) -> str:
    """A label as its class is called: numbers as written, booleans as JSON writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _family(cell: Cell) -> str:
    if isinstance(cell, str):
        return "text"
    if isinstance(cell, tuple):
        return "a list"
    return "true or false" if isinstance(cell, bool) else "numbers"


def _guess(kind: str, column: str, why: str) -> str:
    return f"task: {kind} (guessed from label column {column!r}: {why}; --set task.type=... to change)"


def _are_targets(distinct: Counter[str], numbers: Mapping[str, float]) -> bool:
    """Whether a column that holds (almost) only numbers holds measurements rather than class numbers."""
    finite = [number for number in numbers.values() if math.isfinite(number)]
    rows = sum(distinct[name] for name in numbers)
    if not finite or rows < _MOSTLY * distinct.total():
        return False
    different = len(set(finite))
    return any(not number.is_integer() for number in finite) or (
        different > REGRESSION_DISTINCT and different > REGRESSION_SHARE * rows
    )


def _targets(
    cells: Sequence[Cell], names: Sequence[str], numbers: Mapping[str, float], notices: tuple[str, ...]
) -> Interpreted:
    problems = []
    targets = []
    for index, (cell, name) in enumerate(zip(cells, names, strict=True)):
        number = None if isinstance(cell, bool | tuple) else numbers.get(name)
        targets.append(math.nan if number is None else number)
        if number is None:
            comma = to_number(name.replace(",", ".", 1)) is not None
            fix = "write a number with a decimal point" if comma else "write a number"
            fix += "; if these are classes: --set task.type=classification"
            problems.append(LabelProblem(index, "mixed label types", name, "regression needs a number here", fix))
        elif not math.isfinite(number):
            problems.append(_not_finite(index, name))
    return Interpreted(kind="regression", labels=targets, problems=tuple(problems), notices=notices)


def _classes(
    cells: Sequence[Cell], names: list[str], numbers: Mapping[str, float], main: str, task: str, column: str
) -> Interpreted:
    problems = list(_mixed(cells, main))
    lost = {name for name, number in numbers.items() if not math.isfinite(number)}
    # among words, "nan" or "infinity" may be a class; among numbers it is a value that got lost
    if lost and (main == "numbers" or len(numbers) == len(set(names)) > len(lost)):
        mixed = {problem.index for problem in problems}
        problems += [
            _not_finite(index, name) for index, name in enumerate(names) if name in lost and index not in mixed
        ]
        problems.sort(key=lambda problem: problem.index)
    notices = []
    if task == "auto" and main != "true or false" and len(numbers) == len(set(names)):
        notices.append(_guess("classification", column, f"it holds {len(numbers) - len(lost):,} different numbers"))
    if len(set(numbers.values()) - {math.nan}) < len(numbers) - len(lost):
        twice = Counter(numbers.values()).most_common(1)[0][0]
        spelt = " and ".join(repr(name) for name, number in numbers.items() if number == twice)
        notices.append(f"label column {column!r}: {spelt} are one number but count as different classes")
    return Interpreted(kind="classification", labels=names, problems=tuple(problems), notices=tuple(notices))


def _mixed(cells: Sequence[Cell], main: str) -> list[LabelProblem]:
    usual = excerpt(_name(next(cell for cell in cells if _family(cell) == main)))
    return [
        LabelProblem(
            index,
            "mixed label types",
            _name(cell),
            f"most labels here are {main}, this one is {family}",
            f"write it as the others ({usual}, for example), or put all of them in quotes",
        )
        for index, cell in enumerate(cells)
        if (family := _family(cell)) != main
    ]


def _not_finite(index: int, name: str) -> LabelProblem:
    return LabelProblem(
        index,
        "the label is not a finite number",
        name,
        "a loss with it would be NaN, and so would every weight after the first update",
        "fill in the number or remove the row (--set data.on_bad_row=skip drops and counts such rows)",
    )
