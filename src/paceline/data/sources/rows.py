"""Rows as they stream out of a file, before anything is known about what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.data.columns import Roles

MAX_CELL_CHARACTERS = 10_000_000
"""A cell above this is taken for a mistake (a file pasted into a cell, a quote that never closes)."""

MAX_LABEL_CHARACTERS = 1000
"""A label above this is no name of a class; most likely it is the text."""

SAMPLE_ROWS = 100
"""Rows looked at to learn the columns of a source that has no header, and which of them hold words."""


class Row(NamedTuple):
    """One row and where it stands."""

    file: str
    line: int
    """Line of the row's first character, from 1; the row's number in sources without lines; 0 for a file a row."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stream of rows that share their columns; it can be read once."""

    name: str
    """As the user wrote it; for messages."""
    rows: Iterator[Row]
    columns: tuple[str, ...] | None = None
    """None where each row names its own (JSON lines)."""
    split: str | None = None
    """Split of all rows, where the source says so as a whole."""
    roles: Roles | None = None
    """Where the source settles them itself (a folder), so that nothing is to be found or guessed."""
    notices: tuple[str, ...] = ()
