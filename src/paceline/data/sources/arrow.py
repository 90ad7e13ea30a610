"""Arrow files and the folders of them that ``save_to_disk`` of Hugging Face's datasets makes, read by pyarrow alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.sources.class_names import class_names_in
from paceline.data.sources.lines import refuse_lfs_note, unreadable
from paceline.data.sources.memory import read_memory
from paceline.data.sources.rows import Source, damaged, not_installed, repeated

_PIECE_ROWS = 1024
_SPLITS, _STATE = "dataset_dict.json", "state.json"


def is_saved(folder: Path) -> bool:
    """Whether a folder is what ``save_to_disk`` of a Dataset or a DatasetDict leaves."""
    return (folder / _SPLITS).is_file() or (folder / _STATE).is_file()


def read_arrow(path: Path, name: str) -> list[Source]:
    """Rows of an Arrow file, as a stream or with a footer; a row's line is its number, from 1.

    Raises:
        DataError: pyarrow is not installed, or the file is no whole Arrow file.
    """
    return read_memory(_Saved.of([path], name), name)


def read_saved(folder: Path, name: str) -> list[Source]:
    """Rows of a Dataset or, one source a split, of a DatasetDict. Class numbers become the names that it knows.

    Raises:
        DataError: pyarrow is not installed, a file is missing or damaged, rows are chosen by an index.
    """
    if not (folder / _SPLITS).is_file():
        return read_memory(_Saved.of(_shards(folder, name), name), name)
    splits = _json(folder / _SPLITS, name).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise _incomplete(name, f"{_SPLITS} names no splits")
    found = {split: _Saved.of(_shards(folder / split, f"{name}/{split}"), f"{name}/{split}") for split in splits}
    return read_memory(found, name)


def files_of_saved(folder: Path, name: str) -> list[Path]:
    """The files that ``read_saved`` reads; raises the same errors."""
    if not (folder / _SPLITS).is_file():
        return [folder / _STATE, *_shards(folder, name)]
    splits = _json(folder / _SPLITS, name).get("splits") or []
    return [folder / _SPLITS, *(path for split in splits for path in _shards(folder / split, f"{name}/{split}"))]


def _shards(folder: Path, name: str) -> list[Path]:
    state = _json(folder / _STATE, name)
    if state.get("_indices_data_files"):
        raise DataError(
            "the data set chooses its rows by an index",
            file=name,
            why="an older release of datasets saved it with all rows of the table and a list of those that count",
            fix="dataset.flatten_indices().save_to_disk(...) saves these rows alone",
        )
    listed = state.get("_data_files") or []
    files = [folder / Path(str(entry["filename"])).name for entry in listed if isinstance(entry, dict)]
    if not files:
        raise _incomplete(name, f"{_STATE} names no files")
    if missing := next((file for file in files if not file.is_file()), None):
        raise _incomplete(name, f"{missing.name} is missing")
    return files


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _incomplete(name, f"{path.name} is missing") from None
    except OSError as error:
        raise unreadable(name, error) from None
    except (ValueError, RecursionError) as error:
        raise _incomplete(name, f"{path.name}: {error}") from None
    return found if isinstance(found, dict) else {}


def _incomplete(name: str, why: str) -> DataError:
    return DataError("not a whole saved data set", file=name, why=why, fix="copy it again, or save_to_disk it anew")


class _Saved:
    """What ``read_memory`` asks of a datasets.Dataset, over files that are memory-mapped and opened at once.

    Raises:
        DataError: pyarrow is not installed, a file is damaged, the files have different columns.
    """

    def __init__(self, tables: list[Any], name: str, errors: tuple[type[Exception], ...]) -> None:
        self._tables, self._name, self._errors = tables, name, errors
        self.column_names: list[str] = list(tables[0].schema.names)
        self.features = class_names_in(tables[0].schema.metadata)

    @classmethod
    def of(cls, files: list[Path], name: str) -> _Saved:
        """The rows of several files, one after the other."""
        try:
            import pyarrow
        except ImportError:
            raise not_installed("Arrow files need pyarrow", "parquet", name) from None
        errors = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
        tables = [_table(file, name, errors) for file in files]
        names = [table.schema.names for table in tables]
        if other := next((at for at, found in enumerate(names) if found != names[0]), None):
            raise DataError(
                "the files have different columns",
                file=name,
                why=f"{files[0].name} has {', '.join(names[0])}; {files[other].name} has {', '.join(names[other])}",
                fix="save the data set anew",
            )
        if (twice := repeated(names[0])) is not None:
            raise DataError("a column is named twice", file=name, column=twice, fix="give each column its own name")
        return cls(tables, name, errors)

    def __len__(self) -> int:
        return sum(table.num_rows for table in self._tables)

    def __getitem__(self, column: str) -> list[Any]:
        """The different values of a column."""
        return list({value for table in self._tables for value in table.column(column).unique().to_pylist()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        for table in self._tables:
            for batch in table.to_batches(max_chunksize=_PIECE_ROWS):
                try:
                    rows = batch.to_pylist()
                except self._errors as error:
                    raise damaged("Arrow", self._name, error, number + 1) from None
                number += len(rows)
                yield from rows


def _table(path: Path, name: str, errors: tuple[type[Exception], ...]) -> Any:
    """A file's table, memory-mapped: pages are read when their rows are."""
    import pyarrow

    try:
        refuse_lfs_note(path, name)
        if path.stat().st_size == 0:
            raise DataError(
                "the file is empty", file=name, fix="write it again; an Arrow file holds at least its schema"
            )
        source = pyarrow.memory_map(os.fsencode(path))  # a name may be no text
        if source.read(6) == b"ARROW1":
            return pyarrow.ipc.open_file(source).read_all()
        source.seek(0)
        return pyarrow.ipc.open_stream(source).read_all()
    except errors as error:
        raise damaged("Arrow", name, error) from None
