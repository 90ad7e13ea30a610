"""Names of classes, and the rows of a classifier's head that they stand for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_UNNAMED = "LABEL_"
"""What transformers calls a row that nobody has named, before its number."""

_TRUTHS = {"false": 0.0, "true": 1.0}


def are_unnamed(head: Sequence[str]) -> bool:
    """Whether a head's rows have no names but ``LABEL_0``, ``LABEL_1`` and so on."""
    return bool(head) and all(name == f"{_UNNAMED}{row}" for row, name in enumerate(head))


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: by value where all are numbers, or ``LABEL_`` and a number; otherwise by character."""
    found = set(names)
    values = {name: number_of(name.removeprefix(_UNNAMED)) for name in found}
    alike = len({name.startswith(_UNNAMED) for name in found}) < 2
    if alike and all(math.isfinite(value) for value in values.values()):
        return tuple(sorted(found, key=lambda name: (values[name], name)))
    return tuple(sorted(found))


def rows_by_name(names: Iterable[str], head: Sequence[str]) -> dict[str, int]:
    """The row of each name that ``head`` has: as it is written, else without regard to case where that is one row."""
    exact = {name: row for row, name in enumerate(head)}
    folded: dict[str, int | None] = {}
    for row, name in enumerate(head):
        folded[name.casefold()] = None if name.casefold() in folded else row
    rows = {name: exact.get(name, folded.get(name.casefold())) for name in names}
    return {name: row for name, row in rows.items() if row is not None}


def rows_by_number(names: Iterable[str], size: int) -> dict[str, int]:
    """The row of each name that is a row's number in a head of ``size`` rows: ``2`` and ``2.0`` are row 2."""
    values = {name: number_of(name) for name in names}
    return {name: int(value) for name, value in values.items() if value.is_integer() and 0 <= value < size}


def rows_by_value(names: Iterable[str], head: Sequence[str]) -> dict[str, int]:
    """Return the row of each name that is a number and equals that of one row in ``head``: ``0`` is ``0.0``."""
    values = [number_of(name) for name in head]
    counts = Counter(values)
    alone = {value: row for row, value in enumerate(values) if math.isfinite(value) and counts[value] == 1}
    return {name: alone[value] for name in names if (value := number_of(name)) in alone}


def rows_by_truth(names: Iterable[str], head: Sequence[str]) -> dict[str, int]:
    """Return the row of each name that is true or 1, false or 0, in a head whose two rows are these."""
    rows = {truth_of(name): row for row, name in enumerate(head)}
    values = {name: truth_of(name) for name in names} if len(head) == 2 and rows.keys() == {0.0, 1.0} else {}
    return {name: rows[value] for name, value in values.items() if value in rows}


def numbered(rows: Mapping[str, int], head: Sequence[str]) -> str:
    """That labels stand for rows by number, in words: ``labels are matched by number: 0 is LABEL_0``."""
    pairs = [f"{name} is {head[row]}" for name, row in sorted(rows.items(), key=lambda pair: pair[1])]
    return f"the labels are matched with the model's classes by number: {listed(pairs)}"


def listed(words: Sequence[str], most: int = 10) -> str:
    """The first ``most`` of the words, and how many there are more."""
    return ", ".join(words[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def truth_of(name: str) -> float:
    """Return 1 for true and 0 for false in any case, otherwise ``number_of``."""
    return _TRUTHS.get(name.casefold(), number_of(name))


def number_of(name: str) -> float:
    """Return the number that a class is called, NaN where it is called otherwise."""
    try:
        return float(name)
    except ValueError:
        return math.nan
