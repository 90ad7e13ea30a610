"""Arrow and parquet files, and the folders that ``save_to_disk`` of Hugging Face's datasets makes, by pyarrow alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.sources.class_names import class_names_in
from paceline.data.sources.lines import refuse_lfs_note, unreadable
from paceline.data.sources.memory import read_memory
from paceline.data.sources.rows import (
    LARGE_BYTES,
    Source,
    damaged,
    not_installed,
    repeated,
    require_plausible_size,
)

_PIECE_ROWS = 1024

_MANY_ROWS = 1_000_000
"""Above this, rows take a byte of the file at least: a text takes more, however well it is compressed."""

_FIX = "write the table again from its source; if it is right, write it as CSV or JSON lines"
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


def read_parquet(path: Path, name: str) -> list[Source]:
    """Read the rows of a parquet file; a row's line is its number, from 1. Class numbers become names that it has.

    Raises:
        DataError: pyarrow is not installed, or the file is no whole parquet file.
    """
    return read_memory(_Parquet(path, name), name)


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

    def __init__(self, tables: list[Any], packed: int, name: str, errors: tuple[type[Exception], ...]) -> None:
        self._tables, self._packed, self._name, self._errors = tables, packed, name, errors
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
        packed = sum(file.stat().st_size for file in files)
        _require_plausible_rows(sum(table.num_rows for table in tables), packed, name)
        names = [table.schema.names for table in tables]
        if other := next((at for at, found in enumerate(names) if found != names[0]), None):
            raise DataError(
                "the files have different columns",
                file=name,
                why=f"{files[0].name} has {', '.join(names[0])}; {files[other].name} has {', '.join(names[other])}",
                fix="save the data set anew",
            )
        _require_names(names[0], name)
        return cls(tables, packed, name, errors)

    def __len__(self) -> int:
        return sum(table.num_rows for table in self._tables)

    def __getitem__(self, column: str) -> list[Any]:
        """The different values of a column."""
        return list({value for table in self._tables for value in table.column(column).unique().to_pylist()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = size = 0
        for table in self._tables:
            for batch in table.to_batches(max_chunksize=_PIECE_ROWS):
                try:
                    rows = batch.to_pylist()
                except self._errors as error:
                    raise damaged("Arrow", self._name, error, number + 1) from None
                size += _num_characters(rows)
                require_plausible_size(size, self._packed, self._name, _FIX)
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
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        batches, before = [], pyarrow.total_allocated_bytes()
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            batches.append(batch)
            # what is compressed is expanded now; the rest stays in the file
            require_plausible_size(pyarrow.total_allocated_bytes() - before, path.stat().st_size, name, _FIX)
        return pyarrow.Table.from_batches(batches, reader.schema)
    except errors as error:
        raise damaged("Arrow", name, error) from None


class _Parquet:
    """As ``_Saved``, over a parquet file that is read in small batches.

    Raises:
        DataError: pyarrow is not installed, or the file is no whole parquet file; what it expands to is implausible.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise not_installed("parquet files need pyarrow", "parquet", name) from None
        # a damaged name or text is only found when it is decoded
        self._errors = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
        self._name, self._packed = name, path.stat().st_size
        if self._packed == 0:
            fix = "write it again; a parquet file holds at least its schema"
            raise DataError("the file is empty", file=name, fix=fix)
        with contextlib.ExitStack() as stack:
            try:
                # not by its name, which ParquetFile takes for UTF-8
                source = stack.enter_context(pyarrow.OSFile(os.fsencode(path)))
                self._file = pyarrow.parquet.ParquetFile(source)
                self.column_names: list[str] = list(self._file.schema_arrow.names)
                self.features = class_names_in(self._file.schema_arrow.metadata)
            except self._errors as error:
                raise damaged("parquet", name, error) from None
            _require_names(self.column_names, name)
            metadata = self._file.metadata
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            require_plausible_size(sum(group.total_byte_size for group in groups), self._packed, name, _FIX)
            _require_plausible_rows(metadata.num_rows, self._packed, name)
            self._open = stack.pop_all()  # the rows close it

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = size = 0
        with self._open:
            batches = self._file.iter_batches(batch_size=_batch_rows(self._file.metadata, self._packed))
            while True:
                try:
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                except self._errors as error:
                    raise damaged("parquet", self._name, error, number + 1) from None
                if batch is None:
                    return
                size += _num_characters(rows)
                require_plausible_size(size, self._packed, self._name, _FIX)
                number += len(rows)
                yield from rows


def _num_characters(rows: list[dict[str, Any]]) -> int:
    """Return the length of all texts: a dictionary holds a value once, the rows hold it again and again."""
    return sum(len(cell) for values in rows for cell in values.values() if isinstance(cell, str | bytes))


def _require_plausible_rows(num_rows: int, packed: int, name: str) -> None:
    """Refuse a file that would fill the memory by what it says of itself, before its rows are read."""
    if num_rows > max(_MANY_ROWS, packed):
        why = "rows of less than a byte are no texts but one row again and again"
        raise DataError(f"{num_rows:,} rows in {packed:,} bytes", file=name, why=why, fix=_FIX)


def _batch_rows(metadata: Any, packed: int) -> int:
    """Rows that are read at once: few where a small file may repeat a large value by its dictionary."""
    chunks = (
        metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    largest = max(chunks, default=0)
    return max(1, min(_PIECE_ROWS, max(LARGE_BYTES // max(1, largest), packed // 2**14)))


def _require_names(columns: list[str], name: str) -> None:
    if (twice := repeated(columns)) is not None:
        raise DataError("a column is named twice", file=name, column=twice, fix="give each column its own name")
