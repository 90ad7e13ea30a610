"""Dialects of delimited files: which line is the header, what separates cells, and what quotes them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError, excerpt
from paceline.data.sources.header import HIGHEST_HEADER, Names, find_header, is_number, require_header
from paceline.data.sources.lines import Lines, filtered
from paceline.recipe.parts import DataPart

DELIMITERS = ",;\t|"
_HEAD_LINES, _HEAD_CHARACTERS = 100, 1_000_000
"""Looked at for header and delimiter."""

_HEADER_LINES = 5
"""Lines that the cells of a header may span; above this a quote is not closed."""

_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
"""Excel's own first line, which says what separates the cells."""

_CATEGORIES = 1000
"""Different values of a column whose cells may be names of classes."""

_LEARNT_ROWS = 10_000
"""Rows that say what a column holds."""

_MOST_SUSPECTS = 1000
"""Rows of several lines that are compared with others."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What a reader of a delimited file needs to know of it."""

    delimiter: str
    quote: str = '"'
    """Empty where quotes are characters as others."""
    above: int = 0
    """Lines above the header."""
    skips_blanks: bool = False
    """Whether blanks after a delimiter are left out, so that a quote may follow them."""
    ends_rows: bool = False
    """Whether a delimiter ends each row, but not the header."""
    notices: tuple[str, ...] = field(default=(), compare=False)

    def reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """Cells of each row; csv.Error where quotes do not match."""
        return csv.reader(lines, strict=True, skipinitialspace=self.skips_blanks, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Delimiter and quote as the csv module takes them."""
        quoting = {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        return {"delimiter": self.delimiter, **quoting}

    def split(self, line: str) -> list[str]:
        """Cells of a line whose quotes are characters."""
        return line.rstrip("\r\n").split(self.delimiter)


def detect_dialect(path: Path, name: str, encoding: str, usual: str, part: DataPart) -> Dialect:
    """Return the dialect of a file, by ``part`` where that sets it and by the whole file where not.

    Args:
        path: of the file.
        name: as the user wrote it, for messages.
        encoding: of the file.
        usual: delimiter that the file's suffix stands for.
        part: may set delimiter and quote, and the names of columns.

    Raises:
        DataError: the first line is no header, or one that is separated otherwise than the rows; a quote swallows rows.
    """
    dialect, head = _find_head(_first_lines(path, name, encoding), name, usual, part)
    if head.rows:
        if part.delimiter == "auto":
            head.require_one_delimiter(dialect)
        dialect = replace(dialect, ends_rows=head.has_ended_rows(dialect))
    if dialect.quote and _holds(path, name, encoding, dialect.quote):
        return _Quotes(path, name, encoding, dialect).settle(usual, is_set=part.quote != "auto")
    return dialect


def _first_lines(path: Path, name: str, encoding: str) -> list[str]:
    first, size = list[str](), 0
    with Lines(path, name, encoding) as lines:
        for line in islice(lines, _HEAD_LINES):
            first.append(line)
            size += len(line)
            if size > _HEAD_CHARACTERS:
                break
    return first


@dataclass(frozen=True)
class _Head:
    """A file's beginning: its header and the rows after it, each on a line."""

    name: str
    line: int
    """Number of the header."""
    text: str
    cells: list[str]
    rows: list[str]

    @classmethod
    def at(cls, index: int, lines: Sequence[str], dialect: Dialect, name: str) -> _Head:
        """The head of a file whose header is ``lines[index]``, and as many after that as its quotes ask for."""
        reader = csv.reader(iter(lines[index:]), **dialect.settings)
        try:
            cells = next(reader, [])
        except csv.Error:
            cells = []
        length = reader.line_num
        if not cells or length > _HEADER_LINES:
            cells, length = dialect.split(lines[index]), 1
        rows = [line for line in lines[index + length :] if not line.isspace()]
        return cls(name, index + 1, lines[index].strip("\r\n"), cells, rows)

    def widths(self, dialect: Dialect) -> set[int]:
        """Numbers of cells that the rows have."""
        return {len(_cells(row, dialect)) for row in self.rows}

    def require_header(self, dialect: Dialect, names: Names) -> None:
        """Refuse a title, a comment or a row in the header's place."""
        removed = filtered(self.name, f"tail -n +{self.line + 1}")
        removal = f"remove it, if the next line names the columns: {removed}"
        rows = [_cells(row, dialect) for row in self.rows]
        if len(set(map(len, rows))) == 1:
            removal += f"; put quotes around cells that hold {dialect.delimiter!r}"
        require_header(self.cells, rows, names, name=self.name, line=self.line, removal=removal)

    def require_one_delimiter(self, dialect: Dialect) -> None:
        """Refuse rows that are all separated by another character than the header."""
        width = len(self.cells)
        if width < 2:
            return
        fit = self.widths(dialect) == {width}
        for mark in DELIMITERS.replace(dialect.delimiter, ""):
            if self.widths(replace(dialect, delimiter=mark)) != {width}:
                continue
            # where both fit, the header's is that of the rows unless it only stands within their numbers
            if fit and (dialect.delimiter != "," or len(self.rows) < 2 or not all(map(_has_decimals, self.rows))):
                continue
            new, old = (shown.replace("\t", "\\t") for shown in (mark, dialect.delimiter))
            changed = filtered(self.name, f"sed '{self.line}s/[{old}]/{new}/g'")
            raise DataError(
                f"the header is separated by {dialect.delimiter!r}, and the rows by {mark!r}",
                file=self.name,
                line=self.line,
                found=self.text,
                why=f"the first row is {excerpt(self.rows[0].strip())}",
                fix=f"change the header: {changed}",
            )

    def has_ended_rows(self, dialect: Dialect) -> bool:
        """Whether each row ends with a delimiter, and so has an empty cell more than the header."""
        rows = [_cells(row, dialect) for row in self.rows]
        return len(rows) > 1 and all(len(row) == len(self.cells) + 1 and not row[-1] for row in rows)


def _find_head(lines: Sequence[str], name: str, usual: str, part: DataPart) -> tuple[Dialect, _Head]:
    """The dialect as far as the header tells it, and the header."""
    above, separator = 0, ""
    if lines and (match := _SEPARATOR_LINE.fullmatch(lines[0].strip("\ufeff\r\n "))):
        above, separator = 1, match[1]
    delimiter = separator if part.delimiter == "auto" else part.delimiter
    quote = {"auto": '"', "none": ""}.get(part.quote, part.quote)

    def dialect_at(index: int) -> Dialect:
        mark = delimiter or _commonest(lines[index], usual)
        return Dialect(delimiter=mark, quote=quote, above=index)

    filled = [at for at in range(above, len(lines)) if lines[at].strip(f" \r\n\ufeff{DELIMITERS}")]
    if not filled:
        return Dialect(delimiter=delimiter or usual, quote=quote, above=above), _Head(name, above + 1, "", [], [])
    names = Names.of(part)
    candidates = [_Head.at(at, lines, dialect_at(at), name).cells for at in filled[:HIGHEST_HEADER]]
    chosen = find_header(candidates, names)
    dialect = dialect_at(filled[chosen])
    head = _Head.at(filled[chosen], lines, dialect, name)
    if not chosen:
        head.require_header(dialect, names)
        return dialect, head
    skipped = f"the {chosen} lines above it are" if chosen > 1 else "the line above it is"
    notice = f"{name}: line {head.line} names the columns; {skipped} not read: {excerpt(lines[filled[0]].strip())}"
    return replace(dialect, notices=(notice,)), head


def _commonest(line: str, usual: str) -> str:
    """What separates the cells of a line, outside quotes: the usual one where it does, else the commonest."""
    bare = re.sub(r'"(?:[^"]|"")*"', "", line)
    return usual if usual in bare else max(DELIMITERS, key=lambda mark: (bare.count(mark), mark == usual))


def _cells(line: str, dialect: Dialect) -> list[str]:
    """Cells of one line alone, whatever its quotes."""
    try:
        return next(csv.reader([line], **dialect.settings), [])
    except csv.Error:
        return dialect.split(line)


def _has_decimals(line: str) -> bool:
    """Whether all commas of a line stand between digits, and some do."""
    return "," in line and not re.search(r"(?<!\d),|,(?!\d)", line)


def _holds(path: Path, name: str, encoding: str, character: str) -> bool:
    with Lines(path, name, encoding) as lines:
        return any(character in line for line in lines)


@dataclass(frozen=True)
class _Swallowed:
    """Lines that one row of the reader spans, and that look like a row each."""

    first: int
    last: int
    text: str


@dataclass
class _Survey:
    """Report of one reading of all rows."""

    error: bool = False
    swallowed: _Swallowed | None = None
    quotes_after_blanks: bool = False
    is_even: bool = True
    """Whether every row has as many cells as the header."""


class _Quotes:
    """Decides whether quotes are quotes, over the whole file."""

    def __init__(self, path: Path, name: str, encoding: str, dialect: Dialect) -> None:
        self._path, self._name, self._encoding, self._dialect = path, name, encoding, dialect

    def settle(self, usual: str, *, is_set: bool) -> Dialect:
        """The dialect with the meaning of its quotes.

        Args:
            usual: delimiter that the file's suffix stands for.
            is_set: whether a setting says what quotes.

        Raises:
            DataError: a quote swallows rows.
        """
        dialect, quote = self._dialect, self._dialect.quote
        survey = self._survey(dialect)
        if survey.quotes_after_blanks:
            skipping = replace(dialect, skips_blanks=True)
            again = self._survey(skipping)
            if again.is_even and not again.error and not again.swallowed:
                notice = f"{self._name}: blanks between {dialect.delimiter!r} and a quote are left out"
                return replace(skipping, notices=(*dialect.notices, notice))
        if is_set or not (survey.error or survey.swallowed):
            return dialect
        if usual == "\t" and (count := self._lines_with_characters()):
            notice = (
                f"{self._name}: quotes do not match, and are read as characters as others, in {count:,}"
                f" line{'s' * (count != 1)} (--set 'data.quote={quote}' to read cells between them)"
            )
            return replace(dialect, quote="", notices=(*dialect.notices, notice))
        if survey.swallowed is None:
            return dialect  # reading the rows says what is wrong, and where
        lines = f"lines {survey.swallowed.first:,} to {survey.swallowed.last:,}"
        raise DataError(
            "a quote swallows rows",
            file=self._name,
            line=survey.swallowed.first,
            found=survey.swallowed.text,
            why=f"{lines} would be one row, though each of them looks like a row of its own",
            fix=f"--set data.quote=none reads quotes as characters as others; --set 'data.quote={quote}' if it is one"
            " row, or correct the quotes",
        )

    def _survey(self, dialect: Dialect) -> _Survey:
        survey, suspects, rows = _Survey(), list[tuple[int, list[str]]](), 0
        columns: list[_Column] = []
        is_plain, after_blanks = _plain_line(dialect), _quote_after_blanks(dialect)
        with Lines(self._path, self._name, self._encoding) as lines:
            below = islice(iter(lines), dialect.above, None)
            for first in below:
                # most lines are a row each, with quotes in pairs; only the others are looked at closely
                is_simple = is_plain(first) is not None
                if is_simple and rows > _LEARNT_ROWS and not dialect.skips_blanks:
                    continue
                number, text = lines.number, [first]
                try:
                    cells = next(dialect.reader(_recorded(below, text)), [])
                except csv.Error:
                    survey.error = True
                    break
                if not columns:
                    columns = [_Column() for _ in cells]
                    continue
                survey.is_even &= len(cells) in (0, len(columns))
                if is_simple:
                    rows += 1
                    for column, cell in zip(columns, cells, strict=False):
                        column.add(cell)
                elif len(text) > 1 and len(dialect.split(first)) == len(columns) and len(suspects) < _MOST_SUSPECTS:
                    suspects.append((number, text))
                survey.quotes_after_blanks |= any(map(after_blanks, text)) and any(
                    cell[:1] == " " and cell.lstrip(" ")[:1] == dialect.quote for cell in cells
                )
        for number, text in suspects:
            if _are_rows(text, dialect, columns):
                survey.swallowed = _Swallowed(number, number + len(text) - 1, text[0].strip("\r\n"))
                break
        return survey

    def _lines_with_characters(self) -> int:
        """How many lines hold quotes that can only be characters; 0 where some of them are quotes, or may be."""
        dialect, quote = self._dialect, self._dialect.quote
        width, count, touching, around = 0, 0, 0, 0
        with Lines(self._path, self._name, self._encoding) as lines:
            for line in islice(lines, dialect.above, None):
                cells = dialect.split(line)
                width = width or len(cells)
                if len(cells) != width and not line.isspace():
                    return 0  # a quoted cell may hold the delimiter or a line break
                if quote not in line:
                    continue
                count += 1
                for cell in cells:
                    begins, ends = cell.startswith(quote), cell.endswith(quote) and len(cell) > 1
                    if begins and ends and 2 * quote in cell[1:-1]:
                        return 0
                    touching += begins or ends
                    around += begins and ends
        return count if 2 * around <= touching else 0


def _recorded(lines: Iterator[str], row: list[str]) -> Iterator[str]:
    """The lines of ``row``, then others, which are added to it when they are asked for."""
    yield from tuple(row)
    for line in lines:
        row.append(line)
        yield line


def _plain_line(dialect: Dialect) -> Callable[[str], object]:
    """A test for lines that are a row each, every quote of which stands around a cell, within one or twice."""
    mark, quote = re.escape(dialect.delimiter), re.escape(dialect.quote)
    quoted = f"{quote}[^{quote}]*(?:{quote}{quote}[^{quote}]*)*{quote}"
    cell = f"(?:{quoted}|(?! *{quote})[^{mark}\r\n]*)"
    return re.compile(f"{cell}(?:{mark}{cell})*\r?\n?").fullmatch


def _quote_after_blanks(dialect: Dialect) -> Callable[[str], object]:
    return re.compile(f"(?:^|{re.escape(dialect.delimiter)}) +{re.escape(dialect.quote)}").search


class _Column:
    """Cells that a column holds, as far as they tell a cell of another column from one of its own."""

    def __init__(self) -> None:
        self._categories: set[str] | None = set()
        self._has_numbers = True

    def add(self, cell: str) -> None:
        """Take note of a cell."""
        if self._categories is not None:
            self._categories.add(cell)
            if len(self._categories) > _CATEGORIES:
                self._categories = None
        self._has_numbers = self._has_numbers and is_number(cell)

    def holds(self, cell: str) -> bool:
        """Whether a cell is a number as all others, or one of few values."""
        if not cell:
            return False
        return cell in (self._categories or ()) or (self._has_numbers and is_number(cell))


def _are_rows(lines: Sequence[str], dialect: Dialect, columns: Sequence[_Column]) -> bool:
    """Whether lines are rows by themselves: the first, the last and half of the others fit some column as rows do."""
    rows = [dialect.split(line) for line in lines]
    for at, column in enumerate(columns):
        fits = [len(row) == len(columns) and column.holds(row[at]) for row in rows]
        if fits[0] and fits[-1] and 2 * sum(fits) >= len(rows):
            return True
    return False
