"""Headers of tables: which row of a file names its columns, and whether another one does so again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed
from paceline.data.bad_rows import BadRows
from paceline.data.columns import known_names, normal
from paceline.recipe.parts import DataPart

HIGHEST_HEADER = 20
"""First rows among which a header is looked for: no title or comment seen so far is longer."""

_WORDS_OF_A_TEXT, _CHARACTERS_OF_A_TEXT = 4, 40
"""A column's name with as many words, or more characters, reads like a row's text."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of columns that a header is known by, normalised."""

    known: frozenset[str]
    """By which columns are found."""
    chosen: frozenset[str]
    """In the recipe."""

    @classmethod
    def of(cls, part: DataPart) -> Self:
        labels = (part.label,) if isinstance(part.label, str) else part.label
        chosen = (name for name in (part.text, part.pair, *labels, part.split) if name and name != "auto")
        return cls(known=known_names(), chosen=frozenset(map(normal, chosen)))

    def count(self, cells: Sequence[str]) -> int:
        """Number of cells that are such names."""
        return sum(_bare(cell) in self.known or _bare(cell) in self.chosen for cell in cells)


def find_header(rows: Sequence[Sequence[str]], names: Names) -> int:
    """Return which of the first rows names the columns; the first one, where nothing speaks for another.

    Rows above it are comments, or titles with fewer cells; it has two names that are known, or one in one column.

    Args:
        rows: of the file's beginning, without blank ones; at least one.
        names: that are known.
    """
    filled = [[cell for cell in cells if cell.strip()] for cells in rows]
    if names.count(rows[0]):
        return 0
    for at, cells in enumerate(filled):
        if (count := names.count(cells)) > 1 or count == len(cells) == 1:
            is_below = all(is_comment(above) or len(above) < len(cells) for above in filled[:at])
            return at if is_below else 0
    return 0


def is_comment(cells: Sequence[str]) -> bool:
    """Whether a row begins with ``#``."""
    return bool(cells) and cells[0].lstrip().startswith("#")


def require_header(
    columns: Sequence[str], rows: Sequence[Sequence[str]], names: Names, *, name: str, line: int, removal: str
) -> None:
    """Refuse a title, a comment or a row in the header's place: a row would be lost, and named columns would be none.

    Args:
        columns: as the header names them.
        rows: a few of those below it.
        names: by which columns are found.
        name: of the file, for messages.
        line: of the header.
        removal: fix of a header that is none.

    Raises:
        DataError: says why, and how to write a header, or to say that it is one.
    """
    is_short = bool(rows) and all(len(row) > len(columns) for row in rows)
    if names.count(columns) or not (is_short or (rows and is_comment(columns))):
        _require_names(columns, rows, names, name=name, line=line)
        return
    below = f", the row below it {len(rows[0])}" if is_short else ""
    raise DataError(
        "the first line is no header",
        file=name,
        line=line,
        found=", ".join(columns),
        why=f"it has {len(columns)} cell{'s' * (len(columns) != 1)}{below}; a header names each column",
        fix=removal,
    )


def _require_names(
    columns: Sequence[str], rows: Sequence[Sequence[str]], names: Names, *, name: str, line: int
) -> None:
    if any(_bare(column) in names.known for column in columns):
        return
    chosen = any(_bare(column) in names.chosen and not is_number(column) for column in columns)
    again = next((at for at, column in enumerate(columns) if _is_among(column, at, rows, bool(names.chosen))), None)
    if again is not None:
        why = f"{excerpt(columns[again])} stands in a row below it, too: a column's name is no value of its cells"
    elif not chosen and (text := next(filter(_reads_like_a_text, columns), None)):
        why = f"{excerpt(text)} reads like a text and not like a column's name"
    elif not names.chosen and (number := next(filter(is_number, columns), None)):
        why = f"{excerpt(number)} is a number and no name of a column"
    else:
        return
    fix = "add a line before it that names the columns, for example text,label"
    if again is None:
        fix += "; if it does name them: --set data.text=COLUMN"
    raise DataError(
        "the first row seems to be data, and no header",
        file=name,
        line=line,
        found=", ".join(columns),
        why=why,
        fix=fix,
    )


def name_blanks(columns: Sequence[str]) -> tuple[str, ...]:
    """Name columns without a name by their place, as pandas does, where there are several; a single one stays so."""
    if sum(not column.strip() for column in columns) < 2:
        return tuple(columns)
    return tuple(column if column.strip() else f"Unnamed: {at}" for at, column in enumerate(columns))


@final
class SecondHeader:
    """Recognises rows that name the columns again, as where files were joined with their headers; in any order.

    Two cells that are names of columns suffice: a file with other columns was joined.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._names = {normal(column) for column in columns if column}
        self._longest = max(map(len, columns), default=0) + 2

    def is_in(self, cells: Sequence[str]) -> bool:
        """Whether a row is one."""
        # the whole row is only looked at where its first or last cell is a name
        if not (self._is_name(cells[0]) or self._is_name(cells[-1])):
            return False
        return len({_bare(cell) for cell in cells if self._is_name(cell)}) >= min(2, len(self._names))

    def report(self, cells: Sequence[str], bad: BadRows, *, file: str, line: int) -> tuple[str, ...]:
        """Hand such a row to ``bad``; return the columns in the order that it has them, for the rows below it.

        Raises:
            DataError: bad rows stop the run; or it names other columns, so that the rows below it cannot be read.
        """
        columns = {normal(column): column for column in self._columns}
        order = tuple(columns.get(_bare(cell), "") for cell in cells)
        shown = ", ".join(cells)
        if sorted(order) != sorted(self._columns):
            raise DataError(
                "a second header, which names other columns",
                file=file,
                line=line,
                found=shown,
                why=f"the first one names {listed(self._columns)}; the rows below this one have other columns",
                fix=f"move the rows from line {line:,} on into another file, or give them the columns of the first",
            )
        error = DataError(
            "the header stands again among the rows",
            file=file,
            line=line,
            found=shown,
            why="files were joined with their headers",
            fix="remove the line (--set data.on_bad_row=skip leaves such lines out and counts them)",
        )
        bad.report(error, shown)
        return order

    def _is_name(self, cell: str) -> bool:
        return len(cell) <= self._longest and _bare(cell) in self._names


def _bare(cell: str) -> str:
    """A name without what a file's or a comment's beginning puts before it."""
    return normal(cell.strip().lstrip("\ufeff#"))


def _is_among(column: str, at: int, rows: Sequence[Sequence[str]], may_be_number: bool) -> bool:
    if not column.strip() or (may_be_number and is_number(column)):
        return False
    return any(len(row) > at and row[at].strip() == column.strip() for row in rows)


def is_number(text: str) -> bool:
    """Whether a cell spells a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _reads_like_a_text(name: str) -> bool:
    words = name.split()
    ends = name.rstrip()[-1:] in tuple("。！？…") or (len(words) > 1 and name.rstrip()[-1:] in tuple(".!?"))
    return len(words) >= _WORDS_OF_A_TEXT or len(name) > _CHARACTERS_OF_A_TEXT or ends
