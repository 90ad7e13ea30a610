"""Label cells: what one row says, before it is known what the column holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.bad_rows import cell_text
from paceline.data.sources.literals import Item, chosen_names, read_list
from paceline.data.sources.rows import MAX_LABEL_CHARACTERS

_MOST_BITS = 3_322
"""Bits of an integer with as many digits as a label may have characters."""


@dataclass(frozen=True, slots=True)
class WrittenList:
    """A list that stands in a cell as text, such as ``['slow', 'rude']``: a list where most cells are lists."""

    text: str
    items: tuple[Item, ...]

    def __str__(self) -> str:
        return self.text


Cell = Item | tuple[Item, ...] | WrittenList
"""A label as one row gives it."""


def label_cell(value: object, separator: str | None) -> Cell | None:
    """One label cell in plain Python; None when it is empty.

    Text is stripped, and so are the names of a list. A list, or text cut at ``separator``, may be empty.

    Raises:
        TypeError: the value is no text, number, boolean or list of these.
    """
    if isinstance(value, bytes):
        value = _decode(value)
    if isinstance(value, str):
        value = value.strip()
        items = read_list(value)
        if items is not None:
            return WrittenList(value, tuple(item.strip() if isinstance(item, str) else item for item in items))
        if separator is None:
            return value or None
        return tuple(part.strip() for part in value.split(separator) if part.strip())
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()  # numpy scalars and arrays, tensors
    if isinstance(value, Mapping):
        value = _chosen(value)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_item, value))
    if isinstance(value, Decimal):
        value = float(value)
    if value is None:
        return None if separator is None else ()
    if isinstance(value, bool | int | float):
        _require_short(value)
        return value if separator is None else (value,)
    raise TypeError(f"a label is text, a number or a list of names, not {type(value).__name__}")


def label_name(item: Item) -> str:
    """Return the name of a label's class: numbers as written, booleans as JSON writes them."""
    return str(item).lower() if isinstance(item, bool) else str(item)


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
        text = cell_text(value).strip().lower()
        if text in ("1", "1.0", "true"):
            chosen.append(column)
        elif text not in ("0", "0.0", "false"):
            raise DataError(
                "neither 0 nor 1",
                column=column,
                found=text,
                why="several label columns say of each class whether the row belongs to it",
                fix="write 0 or 1, or name a single label column: --set data.label=COLUMN",
            )
    return tuple(chosen)


def _require_short(value: object) -> None:
    """Refuse integers that have no text in Python, and are no class in any case."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise TypeError(f"an integer of over {MAX_LABEL_CHARACTERS:,} digits")


def _item(value: object) -> Item:
    if isinstance(value, bytes):
        value = _decode(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        value = value.strip()
    if not isinstance(value, str | bool | int | float) or value == "" or value != value:
        raise TypeError("a list of labels holds something that is no name")
    _require_short(value)
    return value


def _chosen(value: Mapping[Any, object]) -> tuple[Item, ...]:
    names = chosen_names(value)
    if names is None:
        raise TypeError("an object as a label says 0 or 1 of each class, nothing else")
    return names


def _decode(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TypeError("a label of bytes is text in UTF-8, these are not") from None
