"""Rows as they stream out of a file, before anything is known about what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from paceline.contract.errors import DataError
from paceline.data.columns import Roles

MAX_CELL_CHARACTERS = 10_000_000
"""A cell above this is taken for a mistake (a file pasted into a cell, a quote that never closes)."""

MAX_LABEL_CHARACTERS = 1000
"""A label above this is no name of a class; most likely it is the text."""

LARGE_BYTES, LARGEST_RATIO = 2**28, 200
"""What a file expands to is refused above both: so many bytes, and so many times the file. Tables are 2 to 30 times."""

SAMPLE_ROWS = 100
"""Rows looked at to learn the columns of a source that has no header, and which of them hold words."""


class Row(NamedTuple):
    """One row and where it stands."""

    file: str
    line: int
    """Line of the row's first character, from 1; the row's number in sources without lines; 0 for a file a row."""
    values: Mapping[str, Any]


@final
class Unusable(str):
    """A cell's text that is no value: an error of a spreadsheet, a formula that was not calculated."""

    problem: str
    fix: str

    def __new__(cls, text: str, problem: str, fix: str) -> Self:
        """Make the text, with the error of a row whose text, label or split it is."""
        cell = super().__new__(cls, text)
        cell.problem, cell.fix = problem, fix
        return cell


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
    folder: Path | None = None
    """Where the names of files in cells begin; None where cells name none."""
    is_piece: bool = False
    """Whether there are others of the same source, so that this one may be empty."""


def require_plausible_size(size: int, packed: int, name: str, fix: str) -> None:
    """Refuse a file whose content would fill the memory, before it is read.

    Args:
        size: bytes of the content, or as many as were counted so far.
        packed: bytes of the file.
        name: of the file, for messages.
        fix: of the error.

    Raises:
        DataError: the content is large, and so many times the file that it is no data.
    """
    if size > max(LARGE_BYTES, LARGEST_RATIO * packed):
        raise DataError(
            f"its {packed:,} bytes expand to {size:,} or more",
            file=name,
            why="that is no table but an attempt to fill the memory, or a program's mistake",
            fix=fix,
        )


def repeated(columns: Sequence[str]) -> str | None:
    """The first column that is named again."""
    seen = set[str]()
    return next((column for column in columns if column in seen or seen.add(column)), None)  # type: ignore[func-returns-value]


def not_installed(what: str, extra: str, name: str = "") -> DataError:
    """``what`` says what needs which library; ``extra`` is paceline's that brings it."""
    return DataError(what, file=name, why="it is not installed", fix=f'pip install "paceline[{extra}]"')


def damaged(
    kind: str, name: str, error: Exception, line: int | None = None, fix: str = "copy or download it again"
) -> DataError:
    """A file of which a library cannot read the whole."""
    why = str(error).split("\n", 1)[0]
    return DataError(f"not a whole {kind} file", file=name, line=line, why=why, fix=fix)
