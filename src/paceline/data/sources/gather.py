"""Rows, checked one by one and gathered into columns."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from paceline.contract.errors import DataError, excerpt, nearest
from paceline.data.bad_rows import BadRows, cell_text, row_text
from paceline.data.columns import SPLITS, Roles
from paceline.data.dataset import Origins
from paceline.data.sources import images
from paceline.data.sources.cells import Cell, WrittenList, blanks_around, indicator_cell, label_cell
from paceline.data.sources.image_depth import Depth
from paceline.data.sources.lines import holds_nul
from paceline.data.sources.picture_files import picture_path, require_local
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, MAX_LABEL_CHARACTERS, Row, Unusable
from paceline.recipe.parts import DataPart

_ABSENT = object()


@dataclass
class Gathered:
    """The rows kept so far, as columns of equal length."""

    contents: list[Any] = field(default_factory=list)
    """Texts, or images as arrays."""
    pairs: list[str] = field(default_factory=list)
    labels: list[Cell] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    lines: array[int] = field(default_factory=lambda: array("q"))
    file_index: array[int] = field(default_factory=lambda: array("i"))
    files: list[str] = field(default_factory=list)
    names_files: bool = False
    """Whether a row's image is in a file that the row names."""
    num_stripped: int = 0
    """Rows whose label has blanks around it, which are left out."""
    first_stripped: str = ""
    """The first of them, in words."""
    _file_numbers: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def add_place(self, row: Row) -> None:
        """Note where a row came from."""
        number = self._file_numbers.setdefault(row.file, len(self.files))
        if number == len(self.files):
            self.files.append(row.file)
        self.file_index.append(number)
        self.lines.append(row.line)

    def place(self, index: int) -> tuple[str, int | None]:
        """File and line of a row; None where the source has no lines."""
        return self.files[self.file_index[index]], self.lines[index] or None

    def drop(self, indices: Collection[int]) -> None:
        """Take rows out again."""
        if not indices:
            return
        gone = set(indices)
        lists: tuple[list[Any], ...] = (self.contents, self.pairs, self.labels, self.splits, self.rows)
        for column in lists:
            column[:] = [value for index, value in enumerate(column) if index not in gone]
        for places in (self.lines, self.file_index):
            places[:] = array(places.typecode, (at for index, at in enumerate(places) if index not in gone))

    def origins(self) -> Origins:
        """Where each row came from."""
        return Origins(
            files=tuple(self.files),
            file_index=np.array(self.file_index, dtype=np.int32),
            lines=np.array(self.lines, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Checks rows and adds them to ``into``; those that cannot be used go to ``bad``.

    Args:
        roles: the columns that are read.
        part: says what cuts a label cell into several, and the side to which images are resized.
        picture: resizes and crops images in place of that.
        pictures: the folder below which images are that cells name; None: cells hold them.
        depth: makes 8 bits of their pixels, and counts what is not read of them.
        keep_rows: whether the original rows are kept too.
    """

    roles: Roles
    into: Gathered
    bad: BadRows
    part: DataPart
    picture: images.Picture | None = None
    pictures: Path | None = None
    depth: Depth | None = None
    keep_rows: bool = False

    def take(self, rows: Iterable[Row], split: str | None, given_splits: Sequence[str] = ()) -> None:
        """Add rows.

        Args:
            split: of all rows; None when the split column says it, or nothing does.
            given_splits: splits that have a file of their own, so that no row here may name them.

        Raises:
            DataError: the first bad row when these stop the run; images of different sizes.
        """
        roles, into = self.roles, self.into
        for row in rows:
            try:
                content = self._image(row) if roles.is_image else text_cell(row, roles.content)
                pair = text_cell(row, roles.pair) if roles.pair else None
                label = self._label(row) if roles.label else None
                named = split or (split_cell(row, roles.split, given_splits) if roles.split else None)
            except DataError as error:
                self.bad.report(error, row_text(row.values))
                continue
            if isinstance(content, np.ndarray) and into.contents:
                images.check_size(content.shape, into.contents[0].shape, file=row.file, line=row.line or None)
            into.contents.append(content)
            into.add_place(row)
            if pair is not None:
                into.pairs.append(pair)
            if label is not None:
                into.labels.append(label)
                self._note_blanks(row)
            if named is not None:
                into.splits.append(named)
            if self.keep_rows:
                # an image is not written out again, and would be held twice
                left_out = roles.content if roles.is_image and self.pictures is None else None
                into.rows.append({column: cell for column, cell in row.values.items() if column != left_out})

    def _image(self, row: Row) -> images.Pixels:
        value = _value(row, self.roles.content)
        if self.pictures is not None and isinstance(value, str) and value.strip():
            require_local(value, row.file, row.line or None, self.roles.content)
            value, named = picture_path(self.pictures, value), True
        else:
            named = False
        self.into.names_files |= named
        if not images.is_image(value):
            raise DataError(
                "no image",
                file=row.file,
                line=row.line or None,
                column=self.roles.content,
                found=cell_text(value),
                why=f"the column holds images, this cell {type(value).__name__}",
                fix="put the image in, or remove the row",
            )
        column, size = None if isinstance(value, Path) and not named else self.roles.content, self.part.image_size
        line = row.line or None
        return images.load(value, size, self.picture, depth=self.depth, file=row.file, line=line, column=column)

    def _note_blanks(self, row: Row) -> None:
        if len(self.roles.label) > 1:
            return  # 0/1 columns hold no names
        written = blanks_around(row.values[self.roles.label[0]], self.part.label_separator)
        if written is None:
            return
        if not self.into.num_stripped:
            place = f"{row.file}:{row.line}" if row.line else row.file
            counts_as = excerpt(written.strip())
            self.into.first_stripped = f"{place} has {excerpt(written)}, which counts as {counts_as}"
        self.into.num_stripped += 1

    def _label(self, row: Row) -> Cell:
        columns = self.roles.label
        if len(columns) > 1:
            values = {column: _value(row, column) for column in columns}
            try:
                return indicator_cell(values, columns)
            except DataError as error:
                raise _at(row, error.column, error.problem, values[error.column or ""], error.why, error.fix) from None
        value = _value(row, columns[0])
        try:
            cell = label_cell(value, self.part.label_separator)
        except TypeError as error:
            raise _at(
                row, columns[0], "the label is of no usable type", value, str(error), 'write "label": "NAME"'
            ) from None
        if cell is None:
            raise _at(
                row,
                columns[0],
                "the label is empty",
                value,
                "every row needs a label",
                "fill it in, or remove the row (--set data.on_bad_row=skip drops and counts such rows)",
            )
        items = cell.items if isinstance(cell, WrittenList) else cell if isinstance(cell, tuple) else (cell,)
        names = [name for name in items if isinstance(name, str)]
        if too_long := next((name for name in names if len(name) > MAX_LABEL_CHARACTERS), None):
            raise _at(
                row,
                columns[0],
                f"a label of over {MAX_LABEL_CHARACTERS:,} characters",
                too_long,
                f"a label names a class; is {columns[0]!r} the column of the text?",
                "--set data.label=COLUMN, or shorten the label",
            )
        for name in names:
            _require_characters(row, columns[0], name)
        return cell


def text_cell(row: Row, column: str) -> str:
    """A text that can be learned from; bytes are read as UTF-8.

    Raises:
        DataError: missing, empty, no text, too long, or with characters that no text holds.
    """
    value = _value(row, column)
    if isinstance(value, bytes):
        value = _decode(row, column, value)
    if not isinstance(value, str):
        _raise_no_text(row, column, value)
    if not value or value.isspace():
        raise _at(
            row,
            column,
            "the text is empty",
            value,
            "there is nothing to learn from",
            "fill it in, or remove the row (--set data.on_bad_row=skip drops and counts such rows)",
        )
    if len(value) > MAX_CELL_CHARACTERS:
        raise _at(
            row,
            column,
            f"a cell of over {MAX_CELL_CHARACTERS // 1_000_000} MB",
            value,
            f"{len(value):,} characters are most likely a mistake; a model reads the first few thousand",
            "cut the text, or remove the row",
        )
    if "\0" in value:
        raise holds_nul(row.file, row.line or None, value.encode(errors="replace"), column=column)
    _require_characters(row, column, value)
    return value


def split_cell(row: Row, column: str, given_splits: Sequence[str] = ()) -> str:
    """The split that a cell names: ``train``, ``validation`` or ``test``.

    Raises:
        DataError: another word, or a split that has a file of its own.
    """
    value = _value(row, column)
    split = SPLITS.get(value.strip().lower()) if isinstance(value, str) else None
    if split is None:
        near = nearest(value, SPLITS) if isinstance(value, str) else "known: train, validation, test"
        raise _at(row, column, "unknown split", value, near, "correct it, or --set data.split=null ignores the column")
    if split in given_splits:
        raise _at(
            row,
            column,
            "the split is given twice",
            value,
            f"data.{split} names a file for it",
            f"remove data.{split}, or --set data.split=null ignores the column",
        )
    return split


def _value(row: Row, column: str) -> Any:
    value = row.values.get(column, _ABSENT)
    if value is _ABSENT:
        raise DataError(
            f"no {column!r} in this row",
            file=row.file,
            line=row.line or None,
            column=column,
            found=row_text(row.values),
            why=f"it has {', '.join(map(repr, map(str, row.values))) or 'nothing'}",
            fix=f"add {column!r}, or remove the row",
        )
    if isinstance(value, Unusable):
        raise _at(row, column, value.problem, value, "", value.fix)
    return value


def _require_characters(row: Row, column: str, text: str) -> None:
    """Refuse half a surrogate pair, which JSON's escapes can spell and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _at(
            row,
            column,
            "half a surrogate pair",
            text[max(0, error.start - 10) : error.start + 10],
            f"character {error.start:,} is \\u{ord(text[error.start]):04x}, which is no character by itself",
            "write the character as UTF-8, or as both halves of the pair",
        ) from None


def _decode(row: Row, column: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _at(
            row,
            column,
            "bytes that are no text in UTF-8",
            value[:60],
            f"a text is text, or bytes of it; are these a file, and {column!r} not the column of the text?",
            "decode them (in pandas .str.decode('gb18030'), for example), or --set data.text=COLUMN",
        ) from None


def _raise_no_text(row: Row, column: str, value: object) -> NoReturn:
    missing = value is None or (isinstance(value, float) and value != value)
    if missing:
        raise _at(
            row,
            column,
            "the text is missing",
            value,
            "the cell holds no value (pandas reads NA, null and None as such; paceline reads them as text)",
            "fill it in; with pandas: read_csv(..., keep_default_na=False)",
        )
    raise _at(
        row,
        column,
        "the text is no text",
        value,
        f"found {type(value).__name__}",
        _text_fix(value),
    )


def _text_fix(value: object) -> str:
    """How to make a text of what is none; str() of a list would have a model learn its brackets."""
    in_pandas = ".str.join(' ')" if isinstance(value, list | tuple) else ".astype(str)"
    return (
        f"write it as text (in JSON in quotes, in pandas {in_pandas}), or name another column: --set data.text=COLUMN"
    )


def _at(row: Row, column: str | None, problem: str, value: object, why: str, fix: str) -> DataError:
    return DataError(
        problem,
        file=row.file,
        line=row.line or None,
        column=column,
        found=cell_text(value),
        why=why,
        fix=fix,
    )
