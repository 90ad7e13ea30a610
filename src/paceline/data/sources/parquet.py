"""Parquet files, as a stream of rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.sources.class_names import ClassNames, class_names_in
from paceline.data.sources.rows import (
    LARGE_BYTES,
    Row,
    Source,
    damaged,
    not_installed,
    repeated,
    require_plausible_size,
)

_BATCH_ROWS = 1024

_MANY_ROWS = 1_000_000
"""Above this, rows take a byte of the file at least: a text takes more, however well it is compressed."""

_FIX = "write the table again from its source; if it is right, write it as CSV or JSON lines"


def read_parquet(path: Path, name: str) -> Source:
    """Rows of a parquet file, read in small batches; a row's line is its number, from 1.

    Class numbers become the names that datasets wrote into the file.

    Raises:
        DataError: pyarrow is not installed, or the file is no whole parquet file.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise not_installed("parquet files need pyarrow", "parquet", name) from None
    # a damaged name or text is only found when it is decoded
    errors = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", file=name, fix="write it again; a parquet file holds at least its schema")
    packed = path.stat().st_size
    with contextlib.ExitStack() as opened:
        try:
            # not by its name, which ParquetFile takes for UTF-8
            source = opened.enter_context(pyarrow.OSFile(os.fsencode(path)))
            file = pyarrow.parquet.ParquetFile(source)
            columns, classes = tuple(file.schema_arrow.names), class_names_in(file.schema_arrow.metadata)
        except errors as error:
            raise damaged("parquet", name, error) from None
        if (twice := repeated(columns)) is not None:
            raise DataError("a column is named twice", file=name, column=twice, fix="give each column its own name")
        _require_plausible_rows(file.metadata, packed, name)
        rows = _rows(file, opened.pop_all(), packed, name, classes, errors)
        return Source(name=name, rows=rows, columns=columns)


def _require_plausible_rows(metadata: Any, packed: int, name: str) -> None:
    """Refuse a file that would fill the memory by what it says of itself, before a page of it is read."""
    size = sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups))
    require_plausible_size(size, packed, name, _FIX)
    if metadata.num_rows > max(_MANY_ROWS, packed):
        raise DataError(
            f"{metadata.num_rows:,} rows in {packed:,} bytes",
            file=name,
            why="rows of less than a byte are no texts but one row again and again",
            fix=_FIX,
        )


def _batch_rows(metadata: Any, packed: int) -> int:
    """Rows that are read at once: few where a small file may repeat a large value by its dictionary."""
    chunks = (
        metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    largest = max(chunks, default=0)
    return max(1, min(_BATCH_ROWS, max(LARGE_BYTES // max(1, largest), packed // 2**14)))


def _rows(
    file: Any,
    opened: contextlib.ExitStack,
    packed: int,
    name: str,
    classes: Mapping[str, ClassNames],
    errors: tuple[type[Exception], ...],
) -> Iterator[Row]:
    line = size = 0
    with opened:
        batches = file.iter_batches(batch_size=_batch_rows(file.metadata, packed))
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            except errors as error:
                raise damaged("parquet", name, error, line + 1) from None
            if batch is None:
                return
            # a dictionary holds a value once, the rows hold it again and again
            size += sum(len(cell) for values in rows for cell in values.values() if isinstance(cell, str | bytes))
            require_plausible_size(size, packed, name, _FIX)
            for values in rows:
                line += 1
                for column, names in classes.items():
                    values[column] = names.read(values[column], file=name, line=line, column=column)
                yield Row(name, line, values)
