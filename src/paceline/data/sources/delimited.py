"""Files of cells between commas, semicolons, tabs or bars, as a stream of rows."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed
from paceline.data.bad_rows import BadRows
from paceline.data.sources.dialect import Dialect, detect_dialect
from paceline.data.sources.header import SecondHeader, name_blanks
from paceline.data.sources.lines import MAX_LINE_BYTES, Lines, filtered
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, Row, Source, repeated
from paceline.recipe.parts import DataPart


def read_delimited(path: Path, name: str, usual: str, bad: BadRows, part: DataPart) -> Source:
    """Rows of a file whose first line names the columns; cells may be quoted and span lines (RFC 4180).

    Every cell is a string, also ``NA``, ``null`` and ``None``. Blank lines are skipped.

    Args:
        path: of the file.
        name: as the user wrote it, for messages.
        usual: delimiter that the file's suffix stands for.
        bad: receives short and long rows, second headers, bad encoding and NULs.
        part: sets encoding, delimiter and quote where they are not ``auto``.

    Raises:
        DataError: no header, a repeated column, whatever ``detect_dialect`` raises; while the rows are read, quotes
            that do not match, and a second header with other columns.
    """
    # a setting of the whole process: raised, never lowered, so that no other reader breaks
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    lines = Lines(path, name, part.encoding)
    dialect = detect_dialect(path, name, lines.encoding, usual, part)
    reader = dialect.reader(islice(iter(lines), dialect.above, None))
    with contextlib.ExitStack() as stack:
        stack.enter_context(lines)
        columns = _header(reader, lines, dialect)
        stack.pop_all()  # the rows close it
    rows = _rows(reader, lines, columns, bad, dialect)
    return Source(name=name, rows=rows, columns=columns, notices=(*lines.notices, *dialect.notices))


def _header(reader: Iterator[list[str]], lines: Lines, dialect: Dialect) -> tuple[str, ...]:
    cells: list[str] = []
    line = 1
    while not cells:
        line = lines.mark() + dialect.above * (not lines.number)
        try:
            cells = next(reader)
        except StopIteration:
            raise DataError(
                "the file is empty",
                file=lines.name,
                why="its first line must name the columns",
                fix=f"write a header and rows, for example text{dialect.delimiter}label".replace("\t", "\\t"),
            ) from None
        except csv.Error as error:
            raise _bad_quotes(error, lines, line) from None
        if problem := lines.take_problem():
            raise problem
    columns = name_blanks(cells)
    if (twice := repeated(columns)) is not None:
        raise DataError(
            "the header names a column twice",
            file=lines.name,
            line=line,
            column=twice,
            found=lines.first.rstrip("\r\n"),
            fix="give each column a name of its own",
        )
    return columns


def _rows(
    reader: Iterator[list[str]], lines: Lines, columns: tuple[str, ...], bad: BadRows, dialect: Dialect
) -> Iterator[Row]:
    name, width = lines.name, len(columns)
    header = SecondHeader(columns)
    with lines:
        while True:
            line = lines.mark()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _bad_quotes(error, lines, line) from None
            if dialect.ends_rows and len(cells) == width + 1 and not cells[-1]:
                cells.pop()
            if problem := lines.take_problem(columns, cells):
                bad.report(problem, lines.first)
            elif cells and header.is_in(cells):
                columns = header.report(cells, bad, file=name, line=line)
            elif len(cells) == width:
                yield Row(name, line, dict(zip(columns, cells, strict=True)))
            elif cells:
                bad.report(_wrong_width(cells, lines, line, columns), lines.first)
            elif width == 1:
                # an empty line is an empty cell here, and no blank line between rows
                yield Row(name, line, {columns[0]: ""})


def _wrong_width(cells: list[str], lines: Lines, line: int, columns: tuple[str, ...]) -> DataError:
    why = f"{len(cells)} cell{'s' * (len(cells) != 1)}; the header names {len(columns)}: {listed(columns, 30)}"
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
        fix=_quotes_meant(lines) or 'put quotes around the cell that holds the separator: "like this, for example"',
    )


def _quotes_meant(lines: Lines) -> str:
    """Return the fix for quotes that no csv reader takes for some, where a row has them."""
    if re.search("[“”„]", lines.first):
        typographic = "sed 's/[“”„]/\"/g'"
        return f"write plain quotes around cells: {filtered(lines.name, typographic)}"
    if '\\"' in lines.first:
        escaped = r"""sed 's/\\"/""/g'"""
        return f'a quote inside a quoted cell is written twice: "": {filtered(lines.name, escaped)}'
    if re.search(r"(?:^|[,;|\t])'.*'(?:$|[,;|\t])", lines.first.strip()):
        return '--set "data.quote=\'" reads cells between single quotes'
    return ""


_CHARACTERS = "or, where quotes are characters as others: --set data.quote=none"


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
            fix=f'close it; a quote inside a quoted cell is written twice: ""; {_CHARACTERS}',
        )
    if "field limit" in message:
        return DataError(
            f"a cell of over {MAX_CELL_CHARACTERS // 1_000_000} MB",
            file=lines.name,
            line=line,
            found=found,
            why=f"the cell had not ended at line {lines.number:,}; most likely a quote is not closed",
            fix=f'close the quote; inside a quoted cell it is written twice: ""; {_CHARACTERS}',
        )
    if "new-line" in message:
        converted = filtered(lines.name, r"tr '\r' '\n'")
        return DataError(
            "a bare carriage return",
            file=lines.name,
            line=line,
            found=found,
            why="lines end in LF or CRLF; a return inside a cell needs quotes around the cell",
            fix=f"{converted}, if the file comes from an old Mac program",
        )
    return DataError(
        "quotes do not match",
        file=lines.name,
        line=line,
        found=found,
        why=f"{message}; the row spans lines {line:,} to {lines.number:,}",
        fix=_quotes_meant(lines)
        or f'close the quote that is open; inside a quoted cell it is written twice: ""; {_CHARACTERS}',
    )
