"""Rows that are in memory already: a pandas DataFrame, a datasets.Dataset (or a DatasetDict), a list of dicts.

They are told apart by what they offer, so that neither pandas nor datasets is imported on their account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.columns import SPLITS
from paceline.data.sources.rows import Row, Source, repeated


def read_memory(rows: object, name: str | None = None) -> list[Source]:
    """The rows of a DataFrame, Dataset, DatasetDict or an iterable of mappings; a row's line is its number, from 1.

    Class numbers of a Dataset's ClassLabel columns become their names; missing values of pandas become None.

    Raises:
        DataError: ``rows`` is something else, or an element is no mapping.
    """
    if isinstance(rows, Mapping) and rows and all(_is_dataset(part) for part in rows.values()):
        return _splits(rows, name or "DatasetDict")
    if _is_dataset(rows):
        return [_dataset(rows, name or "Dataset", None)]
    if hasattr(rows, "itertuples") and hasattr(rows, "columns"):
        return [_frame(rows, name or "DataFrame")]
    if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        return [Source(name=name or "rows", rows=_mappings(rows, name or "rows"))]
    raise DataError(
        f"data of type {type(rows).__name__} cannot be read",
        why="rows in memory are a pandas DataFrame, a datasets.Dataset or a list of dicts",
        fix='data=[{"text": "...", "label": "..."}, ...]',
    )


def _is_dataset(rows: object) -> bool:
    return hasattr(rows, "column_names") and hasattr(rows, "features") and hasattr(rows, "__iter__")


def _mappings(rows: Iterable[object], name: str) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        if not isinstance(values, Mapping):
            raise DataError(
                "the row is no dict",
                file=name,
                line=number,
                found=repr(values),
                why=f"found {type(values).__name__}",
                fix='{"text": "...", "label": "..."}',
            )
        yield Row(name, number, {str(column): value for column, value in values.items()})


def _frame(frame: Any, name: str) -> Source:
    columns = tuple(map(str, frame.columns))
    if (twice := repeated(columns)) is not None:
        raise DataError("two columns have one name", file=name, column=twice, fix="rename one of them")

    def rows() -> Iterator[Row]:
        # itertuples gives numpy scalars their Python types and holds no second copy of the frame
        for number, values in enumerate(frame.itertuples(index=False, name=None), start=1):
            yield Row(name, number, dict(zip(columns, map(_plain, values), strict=True)))

    return Source(name=name, rows=rows(), columns=columns)


def _plain(value: Any) -> Any:
    """pandas' missing values as None, numpy's scalars as Python's."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.ndim == 0:
        value = value.item()
    return None if isinstance(value, float) and value != value else value


def _dataset(dataset: Any, name: str, split: str | None, notices: tuple[str, ...] = ()) -> Source:
    names = _class_names(dataset)

    def rows() -> Iterator[Row]:
        for number, values in enumerate(dataset, start=1):
            for column, known in names.items():
                index = values[column]
                # the Hub marks unlabelled samples by -1
                values[column] = known[index] if index is not None and index >= 0 else None
            yield Row(name, number, values)

    return Source(name=name, rows=rows(), columns=tuple(dataset.column_names), split=split, notices=notices)


def _class_names(dataset: Any) -> dict[str, list[str]]:
    features = dataset.features or {}
    return {
        column: list(feature.names)
        for column, feature in features.items()
        if hasattr(feature, "int2str") and hasattr(feature, "names")
    }


def _splits(datasets: Mapping[Any, Any], name: str) -> list[Source]:
    """One source a split, training first; other splits and unlabelled ones are left out with a notice."""
    taken: dict[str, Any] = {}
    notices = []
    for key, dataset in datasets.items():
        split = SPLITS.get(str(key).lower())
        unlabelled = any(set(dataset[column]) == {-1} for column in _class_names(dataset))
        if split is None or split in taken:
            notices.append(f"{name}: ignored split {str(key)!r} ({len(dataset):,} rows)")
        elif unlabelled:
            notices.append(f"{name}: ignored split {str(key)!r}: its {len(dataset):,} rows have no labels")
        else:
            taken[split] = dataset
    if not taken:
        raise DataError(
            "no usable split",
            file=name,
            why=f"the splits are {', '.join(map(repr, map(str, datasets)))}",
            fix="name one of them train, or pass a single Dataset",
        )
    ordered = sorted(taken, key=("train", "validation", "test").index)
    lone = len(ordered) == 1
    return [
        _dataset(
            taken[split],
            name if lone else f"{name}[{split}]",
            None if lone else split,
            tuple(notices) if at == 0 else (),
        )
        for at, split in enumerate(ordered)
    ]
