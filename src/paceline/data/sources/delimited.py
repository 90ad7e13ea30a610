"""Files of cells between commas, semicolons, tabs or bars, as a stream of rows."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.contract.errors import DataError, excerpt
from paceline.data.bad_rows import BadRows
from paceline.data.sources.lines import MAX_LINE_BYTES, Lines
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, Row, Source, repeated

_DELIMITERS = ",;\t|"


def read_delimited(
    path: Path, name: str, usual: str, bad: BadRows, *, encoding: str = "auto", delimiter: str = "auto"
) -> Source:
    """Rows of a file whose first line names the columns; cells may be quoted and span lines (RFC 4180).

    Every cell is a string, also ``NA``, ``null`` and ``None``. Blank lines are skipped.

    Raises:
        DataError: no header, a repeated column; while the rows are read, quotes that do not match.
            Short and long rows, bad encoding and NULs go to ``bad``.
    """
    # a setting of the whole process: raised, never lowered, so that nobody else's reading breaks
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    lines = Lines(path, name, encoding)
    if delimiter == "auto":
        delimiter = _delimiter(path, name, lines.encoding, usual)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lines)
        columns = _header(reader, lines, delimiter)
        stack.pop_all()  # the rows close it
    return Source(name=name, rows=_rows(reader, lines, columns, bad), columns=columns, notices=lines.notices)


def _delimiter(path: Path, name: str, encoding: str, usual: str) -> str:
    """What separates the cells of the first line, outside quotes: the usual one where it does, else the commonest."""
    with Lines(path, name, encoding) as lines:
        first = next((line for line in lines if not line.isspace()), "")
    bare = re.sub(r'"(?:[^"]|"")*"', "", first)
    return usual if usual in bare else max(_DELIMITERS, key=lambda mark: (bare.count(mark), mark == usual))


def _header(reader: Iterator[list[str]], lines: Lines, delimiter: str) -> tuple[str, ...]:
    cells: list[str] = []
    line = 1
    while not cells:
        line = lines.mark()
        try:
            cells = next(reader)
        except StopIteration:
            raise DataError(
                "the file is empty",
                file=lines.name,
                why="its first line must name the columns",
                fix=f"write a header and rows, for example text{delimiter}label".replace("\t", "\\t"),
            ) from None
        except csv.Error as error:
            raise _bad_quotes(error, lines, line) from None
        if problem := lines.take_problem():
            raise problem
    if (twice := repeated(cells)) is not None:
        raise DataError(
            "the header names a column twice",
            file=lines.name,
            line=line,
            column=twice,
            found=lines.first.rstrip("\r\n"),
            fix="give each column a name of its own",
        )
    return tuple(cells)


def _rows(reader: Iterator[list[str]], lines: Lines, columns: tuple[str, ...], bad: BadRows) -> Iterator[Row]:
    name, width = lines.name, len(columns)
    with lines:
        while True:
            line = lines.mark()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _bad_quotes(error, lines, line) from None
            if problem := lines.take_problem(columns, cells):
                bad.report(problem, lines.first)
            elif len(cells) == width:
                yield Row(name, line, dict(zip(columns, cells, strict=True)))
            elif cells:
                bad.report(_wrong_width(cells, lines, line, columns), lines.first)
            elif width == 1:
                # an empty line is an empty cell here, and no blank line between rows
                yield Row(name, line, {columns[0]: ""})


def _wrong_width(cells: list[str], lines: Lines, line: int, columns: tuple[str, ...]) -> DataError:
    why = f"{len(cells)} cell{'s' * (len(cells) != 1)}; the header names {len(columns)}: {', '.join(columns)}"
    found = lines.first.rstrip("\r\n")
    if len(cells) < len(columns):
        return DataError(
            "the row is too short",
            file=lines.name,
            line=line,
            column=columns[len(cells)],
            found=found,
            why=why,
            fix="add the missing cell; a line break inside a cell needs quotes around the cell",
        )
    return DataError(
        "the row is too long",
        file=lines.name,
        line=line,
        column=columns[-1],
        found=found,
        why=f"{why}; the first cell too many is {excerpt(cells[len(columns)])}",
        fix='put quotes around the cell that holds the separator: "like this, for example"',
    )


def _bad_quotes(error: csv.Error, lines: Lines, line: int) -> DataError:
    """What the csv module could not follow; the rows after it cannot be told apart, so this ends the reading."""
    message = str(error)
    found = lines.first.rstrip("\r\n")
    if "unexpected end" in message:
        return DataError(
            "a quote is not closed",
            file=lines.name,
            line=line,
            found=found,
            why=f"the quoted cell that begins in this row runs to the end of the file (line {lines.number:,})",
            fix='close it; a quote inside a quoted cell is written twice: ""',
        )
    if "field limit" in message:
        return DataError(
            f"a cell of over {MAX_CELL_CHARACTERS // 1_000_000} MB",
            file=lines.name,
            line=line,
            found=found,
            why=f"the cell had not ended at line {lines.number:,}; most likely a quote is not closed",
            fix='close the quote; inside a quoted cell it is written twice: ""',
        )
    if "new-line" in message:
        return DataError(
            "a bare carriage return",
            file=lines.name,
            line=line,
            found=found,
            why="lines end in LF or CRLF; a return inside a cell needs quotes around the cell",
            fix=f"tr '\\r' '\\n' < {lines.name} > converted, if the file comes from an old Mac program",
        )
    return DataError(
        "quotes do not match",
        file=lines.name,
        line=line,
        found=found,
        why=f"{message}; the row spans lines {line:,} to {lines.number:,}",
        fix='close the quote that is open; inside a quoted cell it is written twice: ""',
    )
