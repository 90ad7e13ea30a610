"""Pictures that are in files of their own, which a column of a table or of rows in memory names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path, PurePath

from paceline.contract.errors import DataError
from paceline.data.columns import SPLITS
from paceline.data.sources.entries import entries_of
from paceline.data.sources.images import SUFFIXES

_FIRST = 3
"""Cells that are looked at to know names of files from texts."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def names_pictures(cells: Iterable[object]) -> bool:
    """Return whether cells name files of pictures: all that hold something end in the suffix of one."""
    written = [cell for cell in cells if cell is not None and not (isinstance(cell, str) and not cell.strip())]
    return bool(written) and all(isinstance(cell, str) and _is_picture(cell) for cell in written)


def _is_picture(cell: str) -> bool:
    return "\n" not in cell and PurePath(cell.strip()).suffix.lower() in SUFFIXES


def names_files(folder: Path, cells: Iterable[object]) -> bool:
    """Return whether the first cells name files that are there, of whatever kind."""
    first = list(islice(cells, _FIRST))
    return all(isinstance(cell, str) and PurePath(cell).suffix and os.path.isfile(folder / cell) for cell in first)


def find_base(folder: Path, name: str, cells: Sequence[str], split: str | None) -> tuple[Path, tuple[str, ...]]:
    """Return the folder below which the named files are, and a notice where it is not the table's own.

    The table's folder comes first; else the one of its folders that has most of the files.

    Args:
        folder: that of the table.
        name: the table's, for messages.
        cells: names of some files.
        split: the table's own; of equally good folders, the one named like it is taken.

    Raises:
        DataError: two folders have as many of the files.
    """

    def count(base: Path) -> int:
        return sum(os.path.isfile(picture_path(base, cell)) for cell in cells)

    if not cells or count(folder) or not folder.is_dir():
        return folder, ()
    counts = {inner: count(inner) for inner in entries_of(folder).folders}
    most = max(counts.values(), default=0)
    best = [inner for inner, number in counts.items() if number == most]
    if len(best) > 1 and split is not None:
        best = [inner for inner in best if SPLITS.get(inner.name.lower()) == split] or best
    if not most:
        return folder, ()
    if len(best) > 1:
        shown = ", ".join(str(inner) for inner in best[:3])
        raise DataError(
            "in which folder are the pictures?",
            file=name,
            found=cells[0],
            why=f"{shown} each have such files",
            fix=f"write the folder before the names, as in {best[0].name}/{cells[0]}",
        )
    return best[0], (f"{name}: the pictures that it names are read from {best[0]}",)


def picture_path(base: Path, cell: str) -> Path:
    """Return the path of a file that a cell names below ``base``, or by its absolute path; \\ may stand for /."""
    path = base / cell.strip()  # os.path.isfile takes names of any length
    return path if os.path.isfile(path) or "\\" not in cell else base / cell.strip().replace("\\", "/")


def require_local(cell: str, file: str, line: int | None, column: str) -> None:
    """Require that a cell names a file of this machine.

    Raises:
        DataError: it is an address.
    """
    if _ADDRESS.match(cell.strip()):
        raise DataError(
            "a picture's address",
            file=file,
            line=line,
            column=column,
            found=cell,
            why="pictures are read from files",
            fix="download them, and write the names of the files",
        )


def no_pictures(file: str, columns: Sequence[str]) -> DataError:
    """Return the error for a table without pictures, of which the model takes nothing else."""
    return DataError(
        "no pictures found",
        file=file,
        why=f"none of the columns {', '.join(map(repr, columns))} holds pictures, or names files of them",
        fix="write their names (cat/1.png, relative to the table's folder) into a column file_name; or sort them into"
        " folders: FOLDER/CLASS/*.png",
    )


def names_in_place_of_texts(file: str, column: str, cell: object, *, are_pictures: bool) -> DataError:
    """Return the error for names of files where the model takes texts."""
    other = "choose a model of images" if are_pictures else "write the texts themselves into the column"
    return DataError(
        f"names of {'picture ' * are_pictures}files in place of texts",
        file=file,
        column=column,
        found=str(cell),
        why="the model takes texts, and would learn the names",
        fix=f"{other}, or name another: --set data.text=COLUMN (data.text={column} learns the names)",
    )
