"""Rows that are in memory: frames, data sets and streams of them, columns, arrays, lists.

Each is recognised by its methods, so that no library is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sized
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.bad_rows import cell_text
from paceline.data.columns import SPLITS, Roles
from paceline.data.sources import images
from paceline.data.sources.class_names import class_names_in, class_names_of
from paceline.data.sources.rows import SAMPLE_ROWS, Row, Source, not_installed, repeated

_DICTS = '[{"text": "...", "label": "..."}, ...]'


def read_memory(rows: object, name: str | None = None, *, labelled: bool = True) -> list[Source]:
    """Rows in memory; a row's line is its number, from 1.

    Read are tables of any library that narwhals knows (pandas, polars, pyarrow, dask, DuckDB, PySpark, ...) or that
    speaks Arrow's stream interface, a datasets.Dataset or
    IterableDataset, a map-style Dataset of torch, a dict of columns, a pair (samples, labels), and iterables of dicts,
    of (sample, label) tuples or, without labels, of samples alone. A dict of any of these by split gives one source a
    split. Samples are texts or images.

    Class numbers of a ClassLabel column become their names; missing values of pandas become None.

    Args:
        rows: the rows.
        name: for messages; None: the type's.
        labelled: whether labels are needed.

    Raises:
        DataError: ``rows`` is something else, or its elements are.
    """
    if isinstance(rows, Mapping) and rows and _are_splits(rows):
        by_split = "DatasetDict" if any(map(_is_dataset, rows.values())) else "rows"
        return _splits(rows, name or by_split, labelled)
    return [_one_source(rows, name, labelled)]


def _one_source(rows: Any, name: str | None, labelled: bool) -> Source:
    """Rows that name no splits of their own."""
    if _is_dataset(rows):
        return _dataset(rows, name or "Dataset", None)
    if (frame := _frame(rows, name)) is not None:
        return _rows_of_frame(frame, name or type(rows).__name__)
    if hasattr(rows, "columns") and hasattr(rows, "to_dicts"):
        rows = rows.to_dicts()
    if isinstance(rows, Mapping) and rows:
        return _columns(rows, name or "columns")
    if hasattr(rows, "collate_fn") and hasattr(rows, "dataset"):
        raise DataError(
            "a DataLoader gives batches, not rows", why="paceline makes batches itself", fix="data=loader.dataset"
        )
    if isinstance(rows, tuple) and len(rows) == 2 and all(_is_column(part) for part in rows):
        samples, labels = rows
        _require_equal_lengths({"samples": samples, "labels": labels}, name or "rows")
        return _elements(zip(samples, labels, strict=True), name or "rows", labelled)
    if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        return _elements(rows, name or _type_name(rows), labelled)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not isinstance(rows, str | bytes | Mapping):
        each = (rows[at] for at in range(len(rows)))  # torch's Dataset has no end that iter() would find
        return _elements(each, name or "Dataset", labelled, _classes_of(rows))
    raise _unknown(rows)


def _unknown(rows: object) -> DataError:
    if isinstance(rows, str | Path):
        why, fix = "files by split are named in the recipe", "data: {source: train.csv, test: test.csv}"
        return DataError(f"{str(rows)!r} in place of rows", why=why, fix=fix)
    convert = next((name for name in ("toPandas", "to_pandas", "compute") if hasattr(rows, name)), None)
    return DataError(
        f"data of type {type(rows).__name__} cannot be read",
        why="rows in memory are a DataFrame, a datasets.Dataset, a dict of columns or a list of dicts",
        fix=f"data=data.{convert}()" if convert else f"data={_DICTS}",
    )


def _type_name(rows: object) -> str:
    name = type(rows).__name__
    return name if name in ("Series", "ndarray") else "rows"


def _is_dataset(rows: object) -> bool:
    return hasattr(rows, "column_names") and hasattr(rows, "features") and hasattr(rows, "__iter__")


def _is_column(part: object) -> bool:
    """Whether a part of a pair holds the values of many rows. A tuple may also be a row, so it does not count."""
    is_sequence = isinstance(part, Iterable) and isinstance(part, Sized)
    return is_sequence and not isinstance(part, str | bytes | Mapping | tuple)


def _are_splits(rows: Mapping[Any, Any]) -> bool:
    if all(_is_dataset(part) or _frame(part) is not None for part in rows.values()):
        return True
    return all(str(key).lower() in SPLITS for key in rows)


def _columns(columns: Mapping[Any, Any], name: str) -> Source:
    if single := [key for key, values in columns.items() if not _is_column(values) and not isinstance(values, tuple)]:
        raise DataError(
            "a dict that is not one of columns",
            file=name,
            column=str(single[0]),
            found=repr(columns[single[0]]),
            why="each column is a list or an array with a value for each row",
            fix=f"data={_DICTS}, or data=(texts, labels)",
        )
    _require_equal_lengths(columns, name)
    names = tuple(map(str, columns))

    def rows() -> Iterator[Row]:
        for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
            yield Row(name, number, dict(zip(names, map(_plain, values), strict=True)))

    return Source(name=name, rows=rows(), columns=names)


def _require_equal_lengths(columns: Mapping[Any, Any], name: str) -> None:
    lengths = {str(key): len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "columns of different lengths",
            file=name,
            why=", ".join(f"{key!r} has {length:,} values" for key, length in lengths.items()),
            fix="give each row a value in each column",
        )


def _elements(rows: Iterable[Any], name: str, labelled: bool, classes: tuple[str, ...] = ()) -> Source:
    """Rows of an iterable, whose first element says what all of them are: dicts, (sample, label) tuples or samples."""
    each = iter(rows)
    start = list(islice(each, 1))
    first = _named(_plain(start[0])) if start else {}
    rest = chain(start, each)
    if isinstance(first, Mapping):
        return Source(name=name, rows=_mappings(rest, name))
    is_pair = isinstance(first, tuple) and len(first) == 2
    sample = _plain(first[0]) if is_pair else first
    content = "image" if images.is_image(sample) else "text"
    if not is_pair and (content == "image" or isinstance(sample, str | None)):
        if labelled:
            raise DataError(
                f"{content}s without labels",
                file=name,
                why="what is to be learned of them is missing",
                fix=f"data=({content}s, labels)",
            )
        return Source(name=name, rows=_samples(rest, name, content), columns=(content,), roles=_roles(content, False))
    if not is_pair or (content == "text" and not isinstance(sample, str | None)):
        raise _no_row(name, 1, start[0])
    if not labelled and content == "text" and isinstance(_plain(first[1]), str):
        raise DataError(
            "two texts a row: is the second one a label?",
            file=name,
            line=1,
            found=repr(first),
            why="a model of pairs would read it, any other would not",
            fix='[{"text": "..."}, ...] for single texts, [{"sentence1": "...", "sentence2": "..."}, ...] for pairs',
        )
    pairs = _pairs(rest, name, content, classes)
    return Source(name=name, rows=pairs, columns=(content, "label"), roles=_roles(content, labelled))


def _roles(content: str, labelled: bool) -> Roles:
    return Roles(content=content, is_image=content == "image", label=("label",) if labelled else ())


def _samples(rows: Iterable[Any], name: str, content: str) -> Iterator[Row]:
    for number, value in enumerate(rows, start=1):
        yield Row(name, number, {content: _plain(value)})


def _pairs(rows: Iterable[Any], name: str, content: str, classes: tuple[str, ...]) -> Iterator[Row]:
    for number, pair in enumerate(rows, start=1):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _no_row(name, number, pair)
        label = _plain(pair[1])
        if classes and isinstance(label, int) and 0 <= label < len(classes):
            label = classes[label]
        yield Row(name, number, {content: _plain(pair[0]), "label": label})


def _classes_of(rows: Any) -> tuple[str, ...]:
    """Class names in index order of a data set of torchvision, also below the Subsets that random_split makes."""
    while not hasattr(rows, "classes") and hasattr(rows, "dataset"):
        rows = rows.dataset
    classes = getattr(rows, "classes", ())
    is_names = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    return tuple(classes) if is_names else ()


def _mappings(rows: Iterable[object], name: str) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        row = _named(values)
        if not isinstance(row, Mapping):
            raise _no_row(name, number, values)
        yield Row(name, number, {str(column): value for column, value in row.items()})


def _named(row: Any) -> Any:
    """A named tuple or a record of numpy as a dict; all else as it is."""
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return row._asdict()
    if (names := getattr(getattr(row, "dtype", None), "names", None)) and not row.ndim:
        return dict(zip(names, row.item(), strict=True))
    return row


def _no_row(name: str, number: int, values: object) -> DataError:
    sample = values[0] if isinstance(values, tuple) and values else values
    fix = '{"text": "...", "label": "..."}'
    if isinstance(values, bytes):
        fix = "data=[text.decode() for text in data]"
    elif getattr(sample, "ndim", 0) > 1:
        fix = "images are arrays [height, width, channels] of uint8, or Pillow's: no channels first, no fractions"
    elif getattr(values, "ndim", 0) == 1:
        fix = 'pandas.DataFrame(data, columns=["text", "label"])'
    return DataError(
        "the row is no dict",
        file=name,
        line=number,
        found=cell_text(values),
        why=f"found {type(values).__name__}; rows are dicts, or all (text, label) tuples",
        fix=fix,
    )


def _frame(rows: Any, name: str | None = None) -> Any:
    """Return a table of any library as narwhals has it, which may still be a plan of one; None: it is no table.

    Raises:
        DataError: two columns have one name; a table that is none of narwhals' needs pyarrow, which is not installed.
    """
    if type(rows).__module__ == "builtins":
        return None
    import narwhals
    from narwhals.exceptions import DuplicateError

    try:
        frame = narwhals.from_native(rows, pass_through=True)
        if frame is rows and _speaks_arrow(rows):
            frame = narwhals.from_native(_arrow_table(rows), pass_through=True)
        if isinstance(frame, narwhals.DataFrame):
            _ = frame.columns
    except DuplicateError:
        columns = [str(column) for column in getattr(rows, "column_names", getattr(rows, "columns", ()))]
        raise DataError(
            "two columns have one name",
            file=name or type(rows).__name__,
            column=repeated(columns),
            fix="rename one of them",
        ) from None
    return frame if isinstance(frame, narwhals.DataFrame | narwhals.LazyFrame) else None


def _speaks_arrow(rows: object) -> bool:
    """Check for Arrow's stream of a table; single columns have one, too.

    Source: https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html
    """
    has_columns = any(hasattr(rows, name) for name in ("columns", "column_names", "schema"))
    return has_columns and hasattr(rows, "__arrow_c_stream__")


def _arrow_table(rows: object) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise not_installed(f"a {type(rows).__name__} needs pyarrow", "parquet") from None
    return pyarrow.table(rows)


def _rows_of_frame(frame: Any, name: str) -> Source:
    frame = frame.collect() if hasattr(frame, "collect") else frame
    columns = tuple(map(str, frame.columns))
    classes = class_names_in(getattr(getattr(frame.to_native(), "schema", None), "metadata", None))

    def rows() -> Iterator[Row]:
        for number, row in enumerate(frame.iter_rows(), start=1):
            record = dict(zip(columns, map(_plain, row), strict=True))
            for column, names in classes.items():
                record[column] = names.read(record[column], file=name, line=number, column=column)
            yield Row(name, number, record)

    return Source(name=name, rows=rows(), columns=columns)


def _plain(value: Any) -> Any:
    """Missing values of pandas as None; scalars of numpy, torch and pyarrow as Python's."""
    if value is None or type(value) is str:
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if hasattr(value, "as_py"):
        value = value.as_py()
    elif hasattr(value, "dtype") and getattr(value, "ndim", None) == 0 and not getattr(value.dtype, "names", None):
        value = value.item()
    return None if isinstance(value, float) and value != value else value


def _dataset(dataset: Any, name: str, split: str | None, notices: tuple[str, ...] = ()) -> Source:
    classes = class_names_of(dataset.features)

    def rows() -> Iterator[Row]:
        for number, values in enumerate(dataset, start=1):
            if not isinstance(values, MutableMapping):
                why = f"its format makes a row a {type(values).__name__}"
                raise DataError("the rows are no dicts", file=name, why=why, fix="data=dataset.with_format(None)")
            for column, names in classes.items():
                values[column] = names.read(values[column], file=name, line=number, column=column)
            yield Row(name, number, values)

    # a stream may not know its columns before its first row
    columns = None if dataset.column_names is None else tuple(dataset.column_names)
    return Source(name=name, rows=rows(), columns=columns, split=split, notices=notices)


def _is_unlabelled(part: Any) -> bool:
    """Whether a column of classes holds -1 alone, the Hub's mark; of a stream, its first rows are looked at."""
    if not _is_dataset(part):
        return False
    columns = [column for column, names in class_names_of(part.features).items() if not names.is_list]
    if not columns:
        return False
    if hasattr(part, "__len__"):
        return any(set(part[column]) == {-1} for column in columns)
    start = list(islice(part, SAMPLE_ROWS))
    return any({row[column] for row in start} == {-1} for column in columns)


def _splits(parts: Mapping[Any, Any], name: str, labelled: bool) -> list[Source]:
    """One source a split, training first; other splits and unlabelled ones are left out with a notice."""
    taken: dict[str, Any] = {}
    notices = []
    for key, part in parts.items():
        split = SPLITS.get(str(key).lower())
        count = f" ({len(part):,} rows)" if hasattr(part, "__len__") else ""
        if split is None or split in taken:
            notices.append(f"{name}: ignored split {str(key)!r}{count}")
        elif labelled and _is_unlabelled(part):
            count = f"{len(part):,} " if hasattr(part, "__len__") else ""
            notices.append(f"{name}: ignored split {str(key)!r}: its {count}rows have no labels")
        else:
            taken[split] = part
    if not taken:
        raise DataError(
            "no usable split",
            file=name,
            why=f"the splits are {', '.join(map(repr, map(str, parts)))}",
            fix="name one of them train, or pass a single Dataset",
        )
    ordered = sorted(taken, key=("train", "validation", "test").index)
    lone = len(ordered) == 1
    sources = [
        replace(
            _one_source(taken[split], name if lone else f"{name}[{split}]", labelled), split=None if lone else split
        )
        for split in ordered
    ]
    sources[0] = replace(sources[0], notices=(*sources[0].notices, *notices))
    return sources
