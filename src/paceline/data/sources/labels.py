"""What a column of labels turns out to be, from the cells of all rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.contract.errors import DataError, excerpt
from paceline.data.sources.cells import Cell, WrittenList, label_name
from paceline.data.sources.label_lists import name_labels, no_such_columns
from paceline.data.sources.notation import MISSING, Numbers, are_bits, read_number, read_numbers

Labels = list[str] | list[float] | list[tuple[str, ...]]

REGRESSION_DISTINCT = 20
REGRESSION_SHARE = 0.2
"""Whole numbers are targets, not classes, when more than 20 differ and they are over 20 % of the rows."""

_MOST_CLASSES, _FEW_ROWS = 0.5, 20
"""From 20 rows on, more words than half of them are no classes: another column was picked by mistake."""

_MOSTLY = 0.9
"""When this share of a text column's labels are numbers, the others are taken for mistakes."""

_LIST = "a list"


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
    num_places: int = 0
    """Length of the lists, where they are read by place and the places have no names."""


def interpret(
    cells: Sequence[Cell], task: str, column: str, file: str = "", *, places: Sequence[str] = (), point: str = "auto"
) -> Interpreted:
    """Decide what a column of labels holds, and which rows do not fit.

    Args:
        cells: one for each row; not empty.
        task: ``auto``, ``classification``, ``multi_label`` or ``regression``.
        column: its name, for messages.
        file: where it is, for messages.
        places: names of the classes by place, of lists of 0 and 1.
        point: what stands before the decimals of numbers: ``.``, ``,`` or ``auto``.

    Raises:
        DataError: the labels cannot be of the task that was asked for, or are hardly labels at all.
    """
    main = _main_family(cells)
    if main == _LIST:
        return _lists(cells, task, column, file, places)
    if places:
        raise no_such_columns(file, column, places, "holds no lists of 0 and 1")
    if task == "multi_label":
        raise DataError(
            "task.type = 'multi_label' needs several labels a row",
            file=file,
            column=column,
            why=f"most cells hold {main}",
            fix="--set data.label_separator=';' (what separates them), or a JSON list in a .jsonl file, or one 0/1"
            " column a class: --set data.label=[A,B,C]",
        )
    cells = [cell.text if isinstance(cell, WrittenList) else cell for cell in cells]
    names = [_spelled(cell) for cell in cells]
    distinct = Counter(names)
    numbers = read_numbers(distinct, point)
    if task in ("regression", "auto") and numbers.ambiguous and _are_mostly(numbers.values, distinct):
        raise _ambiguous(numbers.ambiguous, column, file)
    if task == "auto" and point == "auto" and numbers.point == "," and (joined := _joined(numbers.values)):
        raise _joined_or_decimal(joined, column, file)
    if task == "regression" or (task == "auto" and _are_targets(distinct, numbers)):
        if task == "auto" and are_bits(distinct):
            raise _bits(names[0], column, file)
        why = f"it holds {len(numbers.values):,} different numbers"
        return _targets(cells, names, numbers, column, (_guess("regression", column, why),) * (task == "auto"))
    if task == "auto" and numbers.others and _are_mostly((*numbers.values, *numbers.others), distinct):
        raise _several_notations(numbers, column, file)
    words = len(distinct) - len(numbers.values)
    if task == "auto" and len(cells) >= _FEW_ROWS and words > _MOST_CLASSES * len(cells):
        raise DataError(
            f"{len(distinct):,} different labels in {len(cells):,} rows",
            file=file,
            column=column,
            found=names[0],
            why="a class needs several rows to be learned from; this looks like texts or names of rows",
            fix="--set data.label=COLUMN names another column; if these are classes: --set task.type=classification",
        )
    return _classes(cells, names, numbers.values, main, task, column)


def _lists(cells: Sequence[Cell], task: str, column: str, file: str, places: Sequence[str]) -> Interpreted:
    """A column of which most cells are lists."""
    if task == "regression":
        raise _one_label_a_row(task, column, file)
    rows = [cell.items if isinstance(cell, WrittenList) else cell for cell in cells]
    known = [row for row in rows if isinstance(row, tuple)]
    named, notices = name_labels(known, task, column, file, places)
    num_places = len(known[0]) if notices and not places else 0
    if task == "classification" and any(len(names) != 1 for names in named):
        raise _one_label_a_row(task, column, file)
    following = iter(named)
    labels = [next(following) if isinstance(row, tuple) else () for row in rows]
    problems = tuple(_mixed(cells, _LIST))
    written = next((cell.text for cell in cells if isinstance(cell, WrittenList)), None)
    if written is not None:
        notices = (f"label column {column!r}: cells such as {excerpt(written)} are read as lists of labels", *notices)
    if task == "classification":
        one = [names[0] if names else "" for names in labels]
        return Interpreted(kind=task, labels=one, problems=problems, notices=notices)
    if task == "auto":
        notices = (_guess("multi_label", column, "it holds lists"), *notices)
    return Interpreted(kind="multi_label", labels=labels, problems=problems, notices=notices, num_places=num_places)


def _one_label_a_row(task: str, column: str, file: str) -> DataError:
    return DataError(
        f"task.type = {task!r} takes one label a row",
        file=file,
        column=column,
        why="most cells hold a list",
        fix="--set task.type=multi_label, or without data.label_separator if it is set",
    )


def _ambiguous(cell: str, column: str, file: str) -> DataError:
    thousands, decimals = (f"{read_number(cell, point):g}" for point in (".", ","))
    return DataError(
        f"{cell!r} is {thousands} or {decimals}",
        file=file,
        column=column,
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


def _joined_or_decimal(cell: str, column: str, file: str) -> DataError:
    one, other = cell.split(",")
    return DataError(
        f"{cell!r} is {read_number(cell, ','):g}, or labels {one} and {other}",
        file=file,
        column=column,
        why="on both sides of every comma stand other labels of the column",
        fix="--set data.label_separator=, for several labels a row, --set data.decimal=, for numbers",
    )


def _bits(cell: str, column: str, file: str) -> DataError:
    return DataError(
        "labels of zeros and ones alone are no numbers to learn",
        file=file,
        column=column,
        found=cell,
        why="they look like a 0 or 1 for each class, with nothing between them",
        fix="write 0,1,1 and --set data.label_separator=, for several labels a row; if these are classes:"
        " --set task.type=classification, if numbers: --set task.type=regression",
    )


def _several_notations(numbers: Numbers, column: str, file: str) -> DataError:
    examples = [excerpt(next(iter(numbers.values))), excerpt(numbers.others[0])]
    return DataError(
        f"numbers in several notations: {' and '.join(examples)}",
        file=file,
        column=column,
        why="as classes they would have no order, and one number could be two classes",
        fix="write all of them alike; if these are classes: --set task.type=classification",
    )


def _main_family(cells: Sequence[Cell]) -> str:
    """The family of most cells; lists that are written as text count as text where most are no lists."""
    families = Counter(map(_family, cells))
    if families.most_common(1)[0][0] == _LIST:
        return _LIST
    written = sum(isinstance(cell, WrittenList) for cell in cells)
    families["text"] += written
    families[_LIST] -= written
    return families.most_common(1)[0][0]


def _family(cell: Cell) -> str:
    if isinstance(cell, str):
        return "text"
    if isinstance(cell, tuple | WrittenList):
        return _LIST
    return "true or false" if isinstance(cell, bool) else "numbers"


def _spelled(cell: Cell) -> str:
    return str(cell) if isinstance(cell, tuple | WrittenList) else label_name(cell)


def _guess(kind: str, column: str, why: str) -> str:
    return f"task: {kind} (guessed from label column {column!r}: {why}; --set task.type=... to change)"


def _are_mostly(names: Collection[str], distinct: Counter[str]) -> bool:
    missing = sum(rows for name, rows in distinct.items() if name.casefold() in MISSING and name not in names)
    return sum(distinct[name] for name in names) >= _MOSTLY * (distinct.total() - missing)


def _are_targets(distinct: Counter[str], numbers: Numbers) -> bool:
    """Whether a column that holds (almost) only numbers holds measurements rather than class numbers."""
    finite = [number for number in numbers.values.values() if math.isfinite(number)]
    if not finite or not _are_mostly(numbers.values, distinct):
        return False
    if numbers.mark or any(not number.is_integer() for number in finite):
        return True
    rows = sum(distinct[name] for name in numbers.values)
    different = len(set(finite))
    return different > REGRESSION_DISTINCT and different > REGRESSION_SHARE * rows


def _targets(
    cells: Sequence[Cell], names: Sequence[str], numbers: Numbers, column: str, notices: tuple[str, ...]
) -> Interpreted:
    problems = []
    targets = []
    for index, (cell, name) in enumerate(zip(cells, names, strict=True)):
        number = numbers.values.get(name) if isinstance(cell, str) else _number(cell)
        targets.append(math.nan if number is None else number)
        if number is None:
            fix = f"{_respell(name, numbers)}; if these are classes: --set task.type=classification"
            problems.append(LabelProblem(index, "mixed label types", name, "regression needs a number here", fix))
        elif not math.isfinite(number):
            problems.append(_not_finite(index, name))
    if numbers.unusual:
        cell, value, other = numbers.unusual, numbers.values[numbers.unusual], "." if numbers.point == "," else ","
        notice = f"label column {column!r}: {excerpt(cell)} is read as the number {value:.10g}"
        otherwise = read_number(cell, other)
        notice += f" (--set data.decimal={other} reads {otherwise:.10g})" if otherwise not in (None, value) else ""
        notices += (notice,)
    return Interpreted(kind="regression", labels=targets, problems=tuple(problems), notices=notices)


def _number(cell: Cell) -> float | None:
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def _respell(name: str, numbers: Numbers) -> str:
    """How to write a cell that is no number in the notation of the others."""
    other = next((number for point in ",." if (number := read_number(name, point)) is not None), None)
    if other is not None and not numbers.unusual:
        return f"write {other:.10g}"
    usual = next(iter(numbers.values), "1.5")
    return f"write a number, as the others are written ({excerpt(usual)}, for example)"


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
    usual = excerpt(_spelled(next(cell for cell in cells if _family(cell) == main)))
    return [
        LabelProblem(index, "the label is empty", "nan", "every row needs a label", "fill it in, or remove the row")
        if cell != cell  # pandas' NaN, for a cell without a value
        else LabelProblem(
            index,
            "mixed label types",
            _spelled(cell),
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
