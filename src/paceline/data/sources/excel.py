"""Sheets of Excel workbooks, as a stream of rows."""

from __future__ import annotations

import datetime
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.sources.lines import unreadable
from paceline.data.sources.rows import Row, Source, damaged, not_installed, repeated

_PIECE_ROWS = 1000
_PROTECTED = b"\xd0\xcf\x11\xe0"
"""How the older format begins, in which a workbook with a password is wrapped, too."""

_LARGEST_RATIO, _LARGE_BYTES = 200, 2**28
"""What a workbook expands to is refused when it is large and so many times its file: real sheets are 10 to 30 times."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, KeyError, ValueError, TypeError, EOFError)
_damaged = partial(damaged, ".xlsx", fix="copy or download it again; if it opens in a spreadsheet, save it anew")


def read_excel(path: Path, name: str, bad: BadRows) -> Source:
    """Rows of the first visible sheet, whose first row names the columns; a row's line is its number in the sheet.

    Every cell is text, as in a CSV export: numbers and dates as they are written, an empty cell ``""``. A formula
    counts as the value that it was saved with. Empty rows are skipped.

    Raises:
        DataError: openpyxl is not installed, no workbook, no header, a column without a name or with another's.
            Cells beside the named columns go to ``bad``.
    """
    try:
        import openpyxl
    except ImportError:
        raise not_installed(".xlsx files need openpyxl", "excel", name) from None
    try:
        with path.open("rb") as file:
            begin = file.read(len(_PROTECTED))
        if begin == _PROTECTED:
            raise DataError(
                "not an .xlsx file",
                file=name,
                why="it is protected by a password, or is an .xls file by another name",
                fix="save it as .xlsx without a password, or as CSV UTF-8",
            )
        _refuse_bomb(path, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and drop-down lists, which are no data
            workbook = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except OSError as error:
        raise unreadable(name, error) from None
    except _DAMAGE as error:
        raise _damaged(name, error) from None
    try:
        sheets = workbook.worksheets
        sheet = next((sheet for sheet in sheets if sheet.sheet_state == "visible"), None)
        if sheet is None:
            raise DataError("no visible sheet", file=name, fix="show the sheet that holds the rows")
        # what the file says of the sheet's size is wrong in files of some programs
        sheet.reset_dimensions()
        cells = _cells(sheet, name)
        header, columns = _header(cells, name)
    except BaseException:
        workbook.close()
        raise
    notices: tuple[str, ...] = ()
    if len(sheets) > 1:
        others = ", ".join(repr(other.title) for other in sheets if other is not sheet)
        told = f"{name}: read is the sheet {sheet.title!r}; not read: {others} (move another to the front to read it)"
        notices = (told,)
    rows = _rows(workbook, cells, name, header, columns, bad)
    return Source(name=name, rows=rows, columns=columns, notices=notices)


def _refuse_bomb(path: Path, name: str) -> None:
    """Before a part of it is read: a megabyte that expands to gigabytes fills the memory, for a cell is read whole.

    Raises:
        DataError: says both sizes.
    """
    with zipfile.ZipFile(path) as parts:
        # zipfile gives no more of a part than this, whatever is in it
        size = sum(part.file_size for part in parts.infolist())
    packed = path.stat().st_size
    if size > max(_LARGE_BYTES, _LARGEST_RATIO * packed):
        raise DataError(
            f"its {packed:,} bytes expand to {size:,}",
            file=name,
            why="that is no table but an attempt to fill the memory, or a program's mistake",
            fix="save it as CSV UTF-8",
        )


def _cells(sheet: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that hold anything, each with its number, without empty cells at the end."""
    rows = sheet.iter_rows(values_only=True)
    number = 0
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of dates that are none: their cells hold Excel's error
                piece = list(islice(rows, _PIECE_ROWS))
        except _DAMAGE as error:
            raise _damaged(name, error, number + 1) from None
        if not piece:
            return
        for values in piece:
            number += 1
            cells = [_text(value) for value in values]
            while cells and not cells[-1]:
                cells.pop()
            if cells:
                yield number, cells


def _text(value: object) -> str:
    """A cell as a CSV export writes it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return str(value)


def _header(cells: Iterator[tuple[int, list[str]]], name: str) -> tuple[int, tuple[str, ...]]:
    line, columns = next(cells, (0, []))
    if not columns:
        raise DataError(
            "the sheet is empty", file=name, why="its first row must name the columns", fix="write a header and rows"
        )
    if "" in columns:
        raise DataError(
            f"column {columns.index('') + 1} has no name",
            file=name,
            line=line,
            why=f"the first row must name the columns; it holds {', '.join(map(repr, columns))}",
            fix="name the column, or delete it; rows above the header, such as a title, have to go",
        )
    if (twice := repeated(columns)) is not None:
        fix = "give each column a name of its own"
        raise DataError("the header names a column twice", file=name, line=line, column=twice, fix=fix)
    return line, tuple(columns)


def _rows(
    workbook: Any,
    cells: Iterator[tuple[int, list[str]]],
    name: str,
    header: int,
    columns: tuple[str, ...],
    bad: BadRows,
) -> Iterator[Row]:
    try:
        for line, row in cells:
            if len(row) > len(columns):
                error = DataError(
                    "a cell beside the named columns",
                    file=name,
                    line=line,
                    found=row[-1],
                    why=f"row {header:,} names {len(columns)} columns: {', '.join(columns)}",
                    fix="name its column, or delete the cell",
                )
                bad.report(error, ", ".join(row))
                continue
            yield Row(name, line, dict(zip(columns, [*row, *[""] * (len(columns) - len(row))], strict=True)))
    finally:
        workbook.close()
