"""Lists as labels: of names, or of a 0 or 1 for each class by its place (multi-hot)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed
from paceline.data.sources.cells import WrittenList, label_name
from paceline.data.sources.label_column import LabelColumn, LabelProblem
from paceline.data.sources.literals import Item

_INDICATORS = frozenset({"0", "1", "0.0", "1.0", "true", "false"})


class Lists(NamedTuple):
    """A column of lists, read."""

    labels: list[tuple[str, ...]]
    """Names of each row's labels; none where there is a problem."""
    named: list[tuple[str, ...]]
    """The same of the rows that hold a list."""
    problems: tuple[LabelProblem, ...]
    notices: tuple[str, ...]
    num_places: int
    """Length of the lists, where they are read by place and the places have no names."""


def read_lists(column: LabelColumn, *, one_each: bool = False) -> Lists:
    """Return the names of each row's labels in a column of which most cells are lists.

    Args:
        one_each: of lists that hold one 0 or 1 each, read it as the name of a class, not as a place.

    Raises:
        DataError: numbers that are no names of classes.
    """
    rows = [cell.items if isinstance(cell, WrittenList) else cell for cell in column.cells]
    known = [row for row in rows if isinstance(row, tuple)]
    named, notices = _name_labels(known, column.name, column.file, column.places, one_each)
    num_places = len(known[0]) if notices and not column.places else 0
    following = iter(named)
    labels = [next(following) if isinstance(row, tuple) else () for row in rows]
    written = next((cell.text for cell in column.cells if isinstance(cell, WrittenList)), None)
    if written is not None:
        notices = (
            f"label column {column.name!r}: cells such as {excerpt(written)} are read as lists of labels",
            *notices,
        )
    return Lists(labels, named, tuple(column.mixed()), notices, num_places)


def refuse_one_indicator_each(column: LabelColumn) -> None:
    """Refuse lists that hold one 0 or 1 each, which may be a class or say whether a row has the only class.

    Raises:
        DataError: they are such lists, and their places have no names.
    """
    cells = (cell.items if isinstance(cell, WrittenList) else cell for cell in column.cells)
    rows = [cell for cell in cells if isinstance(cell, tuple)]
    widths = {len(row) for row in rows}
    if widths == {1} and not column.places and _hold_indicators(rows, {row[0] for row in rows}, widths):
        why, fix = "each list holds one 0 or 1", "--set task.type=classification for one label a row"
        raise _unclear(column.file, column.name, rows, why, fix)


def one_label_a_row(task: str, column: LabelColumn) -> DataError:
    """The refusal of lists by a task that takes one label a row."""
    return DataError(
        f"task.type = {task!r} takes one label a row",
        file=column.file,
        column=column.name,
        why="most cells hold a list",
        fix="--set task.type=multi_label, or without data.label_separator if it is set",
    )


def _name_labels(
    rows: Sequence[Sequence[Item]], column: str, file: str, places: Sequence[str], one_each: bool
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the names of each row's labels, and notices.

    Lists of one length that hold nothing but 0 and 1 (or booleans) say by place which classes a row has. Other lists
    hold the classes' names or numbers.

    Args:
        rows: the lists.
        column: its name, for messages.
        file: where it is, for messages.
        places: names of the classes by place; empty: their places, counted from 0.
        one_each: as in ``read_lists``.

    Raises:
        DataError: numbers that can be neither, or places whose number is not that of the lists.
    """
    distinct = set(chain.from_iterable(rows))
    widths = {len(row) for row in rows}
    if _hold_indicators(rows, distinct, widths):
        if one_each and widths == {1} and not places:
            return [(label_name(row[0]),) for row in rows], ()
        if len(widths) > 1:
            raise _unclear(
                *(file, column, rows, "lists of 0 and 1 are read by place, and these have different lengths"),
                "write a 0 or 1 for every class, or the names of a row's labels: [slow, rude]",
            )
        return _by_place(rows, column, file, places or [str(place) for place in range(widths.pop())], bool(places))
    if places:
        raise no_such_columns(file, column, places, "holds no lists of 0 and 1")
    _refuse_measurements(rows, distinct, widths, column, file)
    return [tuple(dict.fromkeys(map(label_name, row))) for row in rows], ()


def _hold_indicators(rows: Sequence[Sequence[Item]], distinct: set[Item], widths: set[int]) -> bool:
    if not distinct or not {label_name(item).lower() for item in distinct} <= _INDICATORS:
        return False
    if any(len(set(row)) < len(row) for row in rows):
        return True  # no set of names has one of them twice
    if all(isinstance(item, str) for item in distinct):
        return False
    # [[0], [1], [0, 1]] are the numbers of classes, unless they are spelled as what is true or false
    return len(widths) == 1 or any(isinstance(item, bool | float) for item in chain.from_iterable(rows))


def _by_place(
    rows: Sequence[Sequence[Item]], column: str, file: str, names: Sequence[str], are_given: bool
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    width = len(rows[0])
    if len(names) != width:
        raise no_such_columns(file, column, names, f"holds lists of {width}")
    labels = [
        tuple(name for name, item in zip(names, row, strict=True) if label_name(item).lower() in ("1", "1.0", "true"))
        for row in rows
    ]
    notice = f"label column {column!r}: lists of {width} zeros and ones are read by place, as labels {listed(names)}"
    if not are_given:
        notice += "; --set data.label=[NAME,NAME,...] names them"
        occurring = set(chain.from_iterable(labels))
        absent = [name for name in names if name not in occurring]
        notice += f"; 1 in no row, and left out: {listed(absent)}" if absent else ""
    if all(len(label) == 1 for label in labels):
        notice += "; each row has one: --set task.type=classification learns one label a row"
    return labels, (notice,)


def _refuse_measurements(
    rows: Sequence[Sequence[Item]], distinct: set[Item], widths: set[int], column: str, file: str
) -> None:
    """Refuse lists of numbers that are no classes."""
    if not all(isinstance(item, int | float) for item in distinct):
        return
    if any(isinstance(item, float) and not item.is_integer() for item in distinct):
        raise _unclear(
            *(file, column, rows, "lists of fractions name no classes"),
            "write 0 or 1 for each class, or one number a row for regression",
        )
    if len(widths) == 1 and any(len(set(row)) < len(row) for row in rows):
        raise _unclear(
            *(file, column, rows, "a list of classes has none of them twice; these are padded, or measurements"),
            "leave out what fills the lists up, or write 0 or 1 for each class",
        )


def no_such_columns(file: str, column: str, places: Sequence[str], holds: str) -> DataError:
    """Refuse ``data.label = [...]`` that names neither columns nor the places of the lists in ``column``."""
    return DataError(
        f"data.label = [{listed(places)}]: no such columns",
        file=file,
        why=f"nor are they classes by place: label column {column!r} {holds}",
        fix="name columns of 0 and 1, or a class for each place of the lists",
    )


def _unclear(file: str, column: str, rows: Sequence[Sequence[Item]], why: str, fix: str) -> DataError:
    example = next(row for row in rows if row)
    return DataError(
        "lists of numbers that are no names of classes",
        file=file,
        column=column,
        found=str(list(example)),
        why=why,
        fix=fix,
    )
