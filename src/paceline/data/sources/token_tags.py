"""Data that tag each word of a text (names, parts of speech), known by their shape: they are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.columns import normal
from paceline.errors import DataError

_NAMES = frozenset({"ner_tags", "pos_tags", "chunk_tags", "tags", "ner", "pos", "upos", "xpos", "bio", "iob"})
_TAG = re.compile(r"O|[BIESLU]-\S+")
_MOSTLY = 0.9


def tag_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Column of tags -> column of the words that they belong to.

    A row has as many tags as words, and other rows have other numbers of them; the tags are lists, or text between
    blanks, and come again within a row, which the labels of a multi-label row never do.

    Args:
        columns: the source's columns.
        rows: a few of its rows.
    """
    parts = {name: [_parts(row.get(name)) for row in rows] for name in columns}
    found = {}
    for name in columns:
        if rows and _are_tags(name, parts[name]):
            words = next((other for other in columns if other != name and _aligned(parts[name], parts[other])), None)
            if words is not None:
                found[name] = words
    return found


def no_token_classification(file: str, column: str, words: str, row: Mapping[str, Any]) -> DataError:
    """The refusal; ``row`` is an example."""
    tags = " ".join(_parts(row.get(column)) or ())
    return DataError(
        "token classification is not supported",
        file=file,
        column=column,
        found=tags,
        why=f"it holds a tag for each word of {words!r} (as for named entities); paceline classifies whole texts",
        fix="name a column with a label for each text: --set data.label=COLUMN",
    )


def _parts(value: object) -> list[str] | None:
    """The elements of a cell; None where it has none to speak of."""
    if isinstance(value, str):
        return value.split() or None
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(part, str | int) for part in value):
        return [str(part) for part in value]
    return None


def _are_tags(name: str, cells: Sequence[list[str] | None]) -> bool:
    known = [cell for cell in cells if cell]
    if len({len(cell) for cell in known}) < 2 and normal(name) not in _NAMES:
        return False
    all_parts = [part for cell in known for part in cell]
    if len(all_parts) < 2 * len(known):
        return False
    if sum(_TAG.fullmatch(part) is not None for part in all_parts) >= _MOSTLY * len(all_parts):
        return True
    long = [cell for cell in known if len(cell) > 2]
    again = sum(len(set(cell)) < len(cell) for cell in long) >= 0.5 * len(long) > 0
    is_few = len(set(all_parts)) <= 0.5 * len(all_parts)
    # numbers of classes, or names such as NOUN; words of a text are not all in capitals
    look_like_tags = all(part.isascii() and part == part.upper() for part in all_parts)
    return again and is_few and (normal(name) in _NAMES or look_like_tags)


def _aligned(tags: Sequence[list[str] | None], words: Sequence[list[str] | None]) -> bool:
    pairs = [(tag, word) for tag, word in zip(tags, words, strict=True) if tag]
    alike = sum(word is not None and len(tag) == len(word) and tag != word for tag, word in pairs)
    is_words = any(re.search(r"[^\W\d_]", part) for _, word in pairs for part in word or ())
    return is_words and alike >= _MOSTLY * len(pairs)
