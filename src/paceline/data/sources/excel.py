"""Sheets of Excel workbooks, as a stream of rows."""

from __future__ import annotations

import contextlib
import datetime
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed
from paceline.data.bad_rows import BadRows
from paceline.data.columns import column_list
from paceline.data.sources.header import HIGHEST_HEADER, Names, SecondHeader, find_header, require_header
from paceline.data.sources.lines import unreadable
from paceline.data.sources.rows import Row, Source, Unusable, damaged, not_installed, repeated, require_plausible_size
from paceline.recipe.parts import DataPart

_PIECE_ROWS = 1000
_PROTECTED = b"\xd0\xcf\x11\xe0"
"""How the older format begins, in which a workbook with a password is wrapped, too."""

_PIECE_BYTES = 2**20
_FORMULA = re.compile(rb"<(?:\w+:)?f[ >/]")

_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")

_ERRORS = frozenset(
    {
        *("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A", "#GETTING_DATA", "#SPILL!", "#CALC!"),
        *("#FIELD!", "#BLOCKED!", "#CONNECT!", "#BUSY!", "#UNKNOWN!"),
    }
)

_DAMAGE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, KeyError, ValueError, TypeError, EOFError)
_damaged = partial(damaged, ".xlsx", fix="copy or download it again; if it opens in a spreadsheet, save it anew")


def read_excel(path: Path, name: str, bad: BadRows, part: DataPart) -> Source:
    """Rows of the first visible sheet that has any; a row's line is its number in the sheet.

    The first row names the columns, or one below titles and comments where its names are known. Every cell is text, as
    in a CSV export: numbers and dates as they are written, an empty cell ``""``. A formula counts as the value that it
    was saved with. Empty rows are skipped. Spreadsheets' error values, and formulas without a value, are ``Unusable``.

    Raises:
        DataError: openpyxl is not installed, no workbook, no header, a column without a name or with another's.
            Cells beside the named columns and second headers go to ``bad``.
    """
    try:
        import openpyxl
    except ImportError:
        raise not_installed(".xlsx files need openpyxl", "excel", name) from None
    with contextlib.ExitStack() as stack:
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
            books = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of styles and drop-down lists, which are no data
                for is_value in (True, False)[: 1 + _has_formulas(path)]:
                    books.append(openpyxl.load_workbook(path, read_only=True, data_only=is_value))
                    stack.callback(books[-1].close)
        except OSError as error:
            raise unreadable(name, error) from None
        except _DAMAGE as error:
            raise _damaged(name, error) from None
        sheet, cells, empty = _first_with_rows(books, name)
        header = _header(cells, name, part)
        others = [each for each in books[0].worksheets if each.title != sheet]
        notices = header.notices
        if others:
            listed = ", ".join(f"{each.title!r}{' (empty)' * (each.title in empty)}" for each in others)
            told = f"{name}: read is the sheet {sheet!r}; not read: {listed} (move another to the front to read it)"
            notices = (told, *notices)
        rows = _rows(stack.pop_all(), cells, name, header, bad)  # the rows close the books
        return Source(name=name, rows=rows, columns=header.columns, notices=notices)


def _has_formulas(path: Path) -> bool:
    """Whether a cell of some sheet is a formula."""
    with zipfile.ZipFile(path) as parts:
        for part in parts.namelist():
            if not part.startswith("xl/worksheets/") or not part.endswith(".xml"):
                continue
            with parts.open(part) as file:
                end = b""
                while piece := file.read(_PIECE_BYTES):
                    if _FORMULA.search(end + piece):
                        return True
                    end = piece[-len("<prefix:f>") :]
    return False


def _first_with_rows(books: Sequence[Any], name: str) -> tuple[str, Iterator[tuple[int, list[str]]], list[str]]:
    """Title and cells of the first visible sheet that has rows, and the titles of empty ones before it."""
    visible = [sheet.title for sheet in books[0].worksheets if sheet.sheet_state == "visible"]
    if not visible:
        raise DataError("no visible sheet", file=name, fix="show the sheet that holds the rows")
    for at, title in enumerate(visible):
        sheets = [book[title] for book in books]
        for sheet in sheets:
            # what the file says of the sheet's size is wrong in files of some programs
            sheet.reset_dimensions()
        cells = _cells(sheets, name)
        first = next(cells, None)
        if first is not None:
            return title, chain([first], cells), visible[:at]
    raise DataError(
        "the sheet is empty", file=name, why="its first row must name the columns", fix="write a header and rows"
    )


def _refuse_bomb(path: Path, name: str) -> None:
    """Before a part of it is read: a megabyte that expands to gigabytes fills the memory, for a cell is read whole.

    Raises:
        DataError: says both sizes.
    """
    with zipfile.ZipFile(path) as parts:
        # zipfile gives no more of a part than this, whatever is in it
        size = sum(part.file_size for part in parts.infolist())
    require_plausible_size(size, path.stat().st_size, name, "save it as CSV UTF-8")


def _cells(sheets: Sequence[Any], name: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that hold anything, each with its number, without empty cells at the end.

    Args:
        sheets: with the values of formulas; and the same with formulas, where there are any.
        name: of the file, for messages.
    """
    from openpyxl.formula.tokenizer import TokenizerError

    has_formulas = len(sheets) > 1
    rows = zip(*(sheet.iter_rows(values_only=not has_formulas) for sheet in sheets), strict=True)
    number = 0
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of dates that are none: their cells hold Excel's error
                piece = list(islice(rows, _PIECE_ROWS))
        except (*_DAMAGE, TokenizerError) as error:
            raise _damaged(name, error, number + 1) from None
        if not piece:
            return
        for row in piece:
            number += 1
            cells = list(map(_value_of, *row)) if has_formulas else list(map(_text, row[0]))
            while cells and not cells[-1] and not isinstance(cells[-1], Unusable):
                cells.pop()
            if cells:
                yield number, cells


def _value_of(cell: Any, formula: Any) -> str:
    """The text of a cell, given with its value and with its formula."""
    # a formula that gave an empty text is of type str; one that was never calculated is not
    if cell.value is None and formula.data_type == "f" and cell.data_type != "str":
        return Unusable(
            "",
            f"a formula without its value, {formula.coordinate}",
            "open the file in a spreadsheet and save it, so that the formula is calculated; or save it as CSV UTF-8",
        )
    return _text(cell.value)


def _text(value: object) -> str:
    """A cell as a CSV export writes it."""
    if value is None:
        return ""
    if isinstance(value, str):
        if value in _ERRORS:
            return Unusable(value, "an error of the spreadsheet", "correct the formula, or remove the row")
        return _unescaped(value) if "_x" in value else value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return str(value)


def _unescaped(text: str) -> str:
    """A text with the characters that are written as ``_xHHHH_``, their number in UTF-16 (ECMA-376, ST_Xstring)."""
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    # two halves make a character; one alone is refused where it is read
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The row that names the columns."""

    line: int
    columns: tuple[str, ...]
    rows: Sequence[tuple[int, list[str]]]
    """Rows below it that were looked at."""
    notices: tuple[str, ...]


def _header(cells: Iterator[tuple[int, list[str]]], name: str, part: DataPart) -> _Header:
    first = list(islice(cells, HIGHEST_HEADER))
    names = Names.of(part)
    at = find_header([row for _, row in first], names)
    (line, columns), rows = first[at], first[at + 1 :]
    notices: tuple[str, ...] = ()
    if at:
        skipped = ", ".join(first[0][1])
        notices = (f"{name}: row {line} names the columns; the rows above it are not read: {excerpt(skipped)}",)
    else:
        removal = "delete it, if the next row names the columns; else name each column"
        require_header(columns, [row for _, row in rows], names, name=name, line=line, removal=removal)
    if "" in columns[1:]:  # pandas writes its index into a first column without a name
        raise DataError(
            f"column {columns.index('', 1) + 1} has no name",
            file=name,
            line=line,
            why=f"row {line} must name the columns; it holds {column_list(columns)}",
            fix="name the column, or delete it; a merged cell names its first column alone",
        )
    if (twice := repeated(columns)) is not None:
        fix = "give each column a name of its own"
        raise DataError("the header names a column twice", file=name, line=line, column=twice, fix=fix)
    return _Header(line=line, columns=tuple(columns), rows=rows, notices=notices)


def _rows(
    books: contextlib.ExitStack, cells: Iterator[tuple[int, list[str]]], name: str, header: _Header, bad: BadRows
) -> Iterator[Row]:
    columns, again = header.columns, SecondHeader(header.columns)
    with books:
        for line, row in chain(header.rows, cells):
            if len(row) > len(columns):
                error = DataError(
                    "a cell beside the named columns",
                    file=name,
                    line=line,
                    found=row[-1],
                    why=f"row {header.line:,} names {len(columns)} columns: {listed(columns, 30)}",
                    fix="name its column, or delete the cell; a merged cell of the header names its first column alone",
                )
                bad.report(error, ", ".join(row))
                continue
            row += [""] * (len(columns) - len(row))
            if again.is_in(row):
                columns = again.report(row, bad, file=name, line=line)
                continue
            yield Row(name, line, dict(zip(columns, row, strict=True)))
