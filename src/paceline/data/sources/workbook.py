"""Sheets of workbooks of Excel and LibreOffice, as a stream of rows."""

from __future__ import annotations

import datetime
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed
from paceline.data.bad_rows import BadRows
from paceline.data.columns import column_list
from paceline.data.sources.header import HIGHEST_HEADER, Names, SecondHeader, find_header, require_header
from paceline.data.sources.lines import unreadable
from paceline.data.sources.rows import Row, Source, Unusable, damaged, not_installed, repeated, require_plausible_size
from paceline.recipe.parts import DataPart

if TYPE_CHECKING:
    from python_calamine import CalamineSheet, CalamineWorkbook

_OLE = b"\xd0\xcf\x11\xe0"
_PIECE_BYTES = 2**20
_SPECIAL_CELL = re.compile(rb"""<(?:\w+:)?f[ >/]|\st=["']e["']""")
_LONGEST_MATCH = 64
_COORDINATE = re.compile(r"([A-Z]+)(\d+)")

_HALVES_OF_CHARACTERS = re.compile("_x([dD][89a-fA-F][0-9A-Fa-f]{2})_")

_ERRORS = frozenset(
    {
        *("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A", "#GETTING_DATA", "#SPILL!", "#CALC!"),
        *("#FIELD!", "#BLOCKED!", "#CONNECT!", "#BUSY!", "#UNKNOWN!", *(f"Err:{code}" for code in range(501, 541))),
    }
)
"""Errors as cells show them; those with numbers are LibreOffice's."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, KeyError, ValueError, TypeError, EOFError)

_SpecialCells = Mapping[int, Mapping[int, Unusable]]
"""Cells without a value, by their row and column, both from 0."""


def read_workbook(path: Path, name: str, bad: BadRows, part: DataPart) -> Source:
    """Read the first visible sheet that has any rows; a row's line is its number in the sheet.

    The first row names the columns, or one below titles and comments where its names are known. Every cell is text, as
    in a CSV export: numbers and dates as they are written, an empty cell ``""``. A formula counts as the value that it
    was saved with. Empty rows are skipped. In .xlsx files spreadsheets' error values, and formulas without a value, are
    ``Unusable``; in the older and binary formats they are empty cells.

    Raises:
        DataError: python-calamine is not installed, no workbook, a password, no header, a column without a name or with
            another's. Cells beside the named columns and second headers go to ``bad``.
    """
    try:
        from python_calamine import CalamineError, CalamineWorkbook, PasswordError
    except ImportError:
        raise not_installed(f"{path.suffix} files need python-calamine", "excel", name) from None
    cut = partial(
        damaged, path.suffix.lower(), name, fix="copy or download it again; if it opens in a spreadsheet, save it again"
    )
    try:
        _refuse_bomb(path, name)
        # by the content: programs write one format under the name of another
        with path.open("rb") as file, CalamineWorkbook.from_filelike(file) as book:
            cells, notices = _first_with_rows(book, path, name)
    except OSError as error:
        raise unreadable(name, error) from None
    except (CalamineError, *_DAMAGE) as error:
        if isinstance(error, PasswordError) or _is_ole(path):
            why = "it is protected by a password, or damaged"
            fix = "save it without a password, or as CSV UTF-8"
            raise DataError(f"not a {path.suffix.lower()} file that can be read", file=name, why=why, fix=fix) from None
        raise cut(error) from None
    header = _header(cells, name, part)
    notices = (*notices, *header.notices)
    return Source(name=name, rows=_rows(cells, name, header, bad), columns=header.columns, notices=notices)


def _first_with_rows(
    book: CalamineWorkbook, path: Path, name: str
) -> tuple[Iterator[tuple[int, list[str]]], tuple[str, ...]]:
    """Return the cells of the first visible sheet that has rows, and what to say of the others."""
    from python_calamine import SheetTypeEnum, SheetVisibleEnum

    sheets = [sheet for sheet in book.sheets_metadata if sheet.typ == SheetTypeEnum.WorkSheet]
    visible = [sheet.name for sheet in sheets if sheet.visible == SheetVisibleEnum.Visible]
    if not visible:
        raise DataError("no visible sheet", file=name, fix="show the sheet that holds the rows")
    for number, title in enumerate(visible):
        cells = _cells(book.get_sheet_by_name(title), _special_cells(path, title))
        if (first := next(cells, None)) is None:
            continue
        empty = visible[:number]
        others = ", ".join(f"{x.name!r}{' (empty)' * (x.name in empty)}" for x in sheets if x.name != title)
        notice = f"{name}: read is the sheet {title!r}; not read: {others} (move another to the front to read it)"
        return chain([first], cells), (notice,) * bool(others)
    raise DataError(
        "the sheet is empty", file=name, why="its first row must name the columns", fix="write a header and rows"
    )


def _is_ole(path: Path) -> bool:
    """Check for the container of .xls files, in which newer workbooks with a password are wrapped, too."""
    with path.open("rb") as file:
        return file.read(len(_OLE)) == _OLE


def _refuse_bomb(path: Path, name: str) -> None:
    """Refuse a zip file before a part of it is read: a megabyte that expands to gigabytes fills the memory.

    Raises:
        DataError: says both sizes.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as parts:
            # zipfile gives no more of a part than this, whatever is in it
            size = sum(part.file_size for part in parts.infolist())
        require_plausible_size(size, path.stat().st_size, name, "save it as CSV UTF-8")


def _special_cells(path: Path, title: str) -> _SpecialCells:
    """Return errors and formulas without a value of a sheet in .xlsx, which calamine gives as empty cells.

    Both stand in the sheet's XML (ECMA-376, CT_Cell): an error is of type e, a formula in f, its value in v.
    """
    special: dict[int, dict[int, Unusable]] = defaultdict(dict)
    if not zipfile.is_zipfile(path):
        return special
    with zipfile.ZipFile(path) as parts:
        part = _part_of_sheet(parts, title)
        if part is None or not _has_special_cells(parts, part):
            return special
        with parts.open(part) as file:
            for _, element in ElementTree.iterparse(file):
                kind = element.tag.rpartition("}")[2]
                if kind == "c" and (cell := _unusable(element)) is not None:
                    letters, digits = _COORDINATE.fullmatch(element.attrib["r"]).groups()  # type: ignore[union-attr]
                    column = 0
                    for letter in letters:
                        column = 26 * column + ord(letter) - ord("A") + 1
                    special[int(digits) - 1][column - 1] = cell
                if kind == "row":
                    element.clear()
    return special


def _part_of_sheet(parts: zipfile.ZipFile, title: str) -> str | None:
    """Return the name of the part that holds a sheet; None in workbooks of another format."""
    if "xl/workbook.xml" not in parts.namelist():
        return None
    names = {element.get("name"): element for element in ElementTree.fromstring(parts.read("xl/workbook.xml")).iter()}
    ids = {value for key, value in names[title].attrib.items() if key.endswith("}id")}
    relations = ElementTree.fromstring(parts.read("xl/_rels/workbook.xml.rels"))
    target = next(relation.attrib["Target"] for relation in relations if relation.get("Id") in ids)
    return target.removeprefix("/") if target.startswith("/") else f"xl/{target}"


def _has_special_cells(parts: zipfile.ZipFile, part: str) -> bool:
    """Check whether a cell of a sheet is an error or a formula, which takes a fraction of parsing it."""
    with parts.open(part) as file:
        end = b""
        while piece := file.read(_PIECE_BYTES):
            if _SPECIAL_CELL.search(end + piece):
                return True
            end = piece[-_LONGEST_MATCH:]
    return False


def _unusable(cell: ElementTree.Element) -> Unusable | None:
    content = {part.tag.rpartition("}")[2]: part.text or "" for part in cell}
    if cell.get("t") == "e":
        return Unusable(content.get("v", ""), "an error of the spreadsheet", "correct the formula, or remove the row")
    # a formula that gave an empty text is of type str; one that was never calculated is not
    if "f" in content and not content.get("v") and cell.get("t") != "str":
        return Unusable(
            "",
            f"a formula without its value, {cell.get('r')}",
            "open the file in a spreadsheet and save it, so that the formula is calculated; or save it as CSV UTF-8",
        )
    return None


def _cells(sheet: CalamineSheet, special: _SpecialCells) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that hold anything, each with its number, without empty cells at the end."""
    # calamine leaves out empty columns before the first cell that it knows, but no rows
    skipped = sheet.start[1] if sheet.start else 0
    left = min([skipped, *(column for row in special.values() for column in row)])
    rows, last = sheet.iter_rows(), max(special, default=-1)
    for number in count():
        values = next(rows, None)
        if values is None and number > last:
            return
        cells = [""] * (skipped - left) + list(map(_text, values or ()))
        for column, cell in special.get(number, {}).items():
            cells += [""] * (column - left + 1 - len(cells))
            cells[column - left] = cell
        while cells and not cells[-1] and not isinstance(cells[-1], Unusable):
            cells.pop()
        if cells:
            yield number + 1, cells


def _text(value: Any) -> str:
    """Return a cell as a CSV export writes it."""
    if isinstance(value, str):
        if value in _ERRORS:
            return Unusable(value, "an error of the spreadsheet", "correct the formula, or remove the row")
        return _whole_characters(value) if "_x" in value else value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return str(value)


def _whole_characters(text: str) -> str:
    """Join characters written as two ``_xHHHH_`` (ECMA-376, ST_Xstring); calamine has read those written as one."""
    text = _HALVES_OF_CHARACTERS.sub(lambda match: chr(int(match[1], 16)), text)
    # a half alone is refused where it is read
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


def _rows(cells: Iterator[tuple[int, list[str]]], name: str, header: _Header, bad: BadRows) -> Iterator[Row]:
    columns, again = header.columns, SecondHeader(header.columns)
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
