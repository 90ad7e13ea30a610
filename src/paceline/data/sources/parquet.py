"""Parquet files, as a stream of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.sources.class_names import ClassNames, class_names_in
from paceline.data.sources.rows import Row, Source, damaged, not_installed, repeated

_BATCH_ROWS = 1024


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
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns, classes = tuple(file.schema_arrow.names), class_names_in(file.schema_arrow.metadata)
    except errors as error:
        raise damaged("parquet", name, error) from None
    if (twice := repeated(columns)) is not None:
        file.close()
        raise DataError("a column is named twice", file=name, column=twice, fix="give each column its own name")
    return Source(name=name, rows=_rows(file, name, classes, errors), columns=columns)


def _rows(
    file: Any, name: str, classes: Mapping[str, ClassNames], errors: tuple[type[Exception], ...]
) -> Iterator[Row]:
    line = 0
    with file:
        batches = file.iter_batches(batch_size=_BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            except errors as error:
                raise damaged("parquet", name, error, line + 1) from None
            if batch is None:
                return
            for values in rows:
                line += 1
                for column, names in classes.items():
                    values[column] = names.read(values[column], file=name, line=line, column=column)
                yield Row(name, line, values)
