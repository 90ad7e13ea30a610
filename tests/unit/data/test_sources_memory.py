"""Rows in memory: every container that people hold data in gives the rows of a list of dicts, or says what to write."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from PIL import Image

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled
from paceline.data.table import Table
from paceline.recipe.parts import DataPart

TEXTS = ["a fine day", "a bad day", "fine again", "bad again"]
LABELS = ["good", "bad", "good", "bad"]
DICTS = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]


def labelled(rows: object, **settings: Any) -> Table:
    return read(DataPart(source="memory", **settings), rows=rows)


def unlabelled(rows: object, **settings: Any) -> Table:
    (table,) = read_unlabelled(DataPart(source="memory", **settings), 100, rows=rows, tell=lambda notice: None)
    return table


class Stream:
    """What paceline asks of a datasets.IterableDataset; columns and features may be unknown."""

    def __init__(self, rows: list[dict[str, Any]], columns: list[str] | None = None, names: Any = None) -> None:
        self._rows, self.column_names = rows, columns
        self.features = {"label": SimpleNamespace(names=names, int2str=names.__getitem__)} if names else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([dict(row) if isinstance(row, dict) else row for row in self._rows])


class OtherFrame:
    """A frame of a library that narwhals does not know, with polars' method; iterating gives its columns."""

    columns = ("text", "label")

    def __iter__(self) -> Iterator[Any]:
        return iter(pandas.DataFrame(DICTS).items())

    def to_dicts(self) -> list[dict[str, Any]]:
        return DICTS


class Arrow:
    """A frame of any library that speaks Arrow's C stream interface."""

    columns = ("text", "label")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pyarrow.Table.from_pylist(DICTS).__arrow_c_stream__(requested_schema)


class MapStyle(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> Any:
        return self._rows[at % len(self._rows)]  # has no end of its own


PAIRS = list(zip(TEXTS, LABELS, strict=True))
CONTAINERS = {
    "stream": lambda: Stream(DICTS),
    "stream with columns": lambda: Stream(DICTS, ["text", "label"]),
    "pandas": lambda: pandas.DataFrame(DICTS),
    "polars": lambda: polars.DataFrame(DICTS),
    "lazy polars": lambda: polars.LazyFrame(DICTS),
    "polars categories": lambda: polars.DataFrame(DICTS, schema_overrides={"label": polars.Categorical}),
    "frame of another library": OtherFrame,
    "arrow table": lambda: pyarrow.Table.from_pylist(DICTS),
    "arrow batch": lambda: pyarrow.RecordBatch.from_pylist(DICTS),
    "arrow stream": Arrow,
    "columns": lambda: {"text": TEXTS, "label": LABELS},
    "columns of series": lambda: dict(pandas.DataFrame(DICTS)),
    "columns of arrays": lambda: {"text": np.array(TEXTS), "label": np.array(LABELS)},
    "columns of tuples": lambda: {"text": tuple(TEXTS), "label": tuple(LABELS)},
    "pair of lists": lambda: (TEXTS, LABELS),
    "pair of series": lambda: (pandas.Series(TEXTS, index=[4, 3, 2, 1]), pandas.Series(LABELS)),
    "pair of arrays": lambda: (np.array(TEXTS), np.array(LABELS, dtype=object)),
    "pair of arrow arrays": lambda: (pyarrow.array(TEXTS), pyarrow.chunked_array([LABELS])),
    "tuples": lambda: PAIRS,
    "generator of tuples": lambda: iter(PAIRS),
    "named tuples": lambda: list(pandas.DataFrame(DICTS)[["label", "text"]].itertuples(index=False)),
    "records": lambda: pandas.DataFrame(DICTS).to_records(index=False),
    "torch": lambda: MapStyle(PAIRS),
    "torch of dicts": lambda: MapStyle(DICTS),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_gives_the_rows_of_a_list_of_dicts(name: str) -> None:
    table = labelled(CONTAINERS[name]())
    assert (table.texts, table.labels, table.kind) == (TEXTS, LABELS, "classification")
    assert table.columns == {"text": "text", "label": "label"}
    assert table.origins.lines.tolist() == [1, 2, 3, 4]


SPLITS = {
    "streams": {"train": Stream(DICTS), "unsupervised": Stream(DICTS), "test": Stream(DICTS[:2])},
    "lazy frames": {"train": polars.LazyFrame(DICTS), "test": polars.LazyFrame(DICTS[:2])},
    "frames": {"train": pandas.DataFrame(DICTS), "test": pandas.DataFrame(DICTS[:2])},
    "lists": {"test": DICTS[:2], "train": DICTS},
    "pairs": {"train": (TEXTS, LABELS), "test": (TEXTS[:2], LABELS[:2])},
    "columns": {"train": {"text": TEXTS, "label": LABELS}, "test": {"text": TEXTS[:2], "label": LABELS[:2]}},
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_dict_by_split_keeps_its_splits(name: str) -> None:
    table = labelled(SPLITS[name])
    assert table.texts == [*TEXTS, *TEXTS[:2]]
    assert table.splits == ["train"] * 4 + ["test"] * 2
    assert any("ignored split 'unsupervised'" in notice for notice in table.notices) == (name == "streams")


def test_a_stream_without_labels_is_left_out() -> None:
    names = ["bad", "good"]
    numbers = [{"text": text, "label": at % 2} for at, text in enumerate(TEXTS)]
    hidden = [row | {"label": -1} for row in numbers]
    table = labelled({"train": Stream(numbers, names=names), "test": Stream(hidden, names=names)})
    assert table.labels == ["bad", "good", "bad", "good"]
    assert any("ignored split 'test': its rows have no labels" in notice for notice in table.notices)


@pytest.mark.parametrize(
    "rows",
    [
        TEXTS,
        tuple(TEXTS),
        iter(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pandas.Series(TEXTS),
        pandas.Series(TEXTS, dtype="string"),
        pyarrow.array(TEXTS),
        MapStyle(TEXTS),
        (TEXTS, [1, 2, 3, 4]),
        {"text": TEXTS},
    ],
)
def test_texts_alone_are_predicted_for(rows: object) -> None:
    table = unlabelled(rows)
    assert table.texts == TEXTS
    assert [row["text"] for row in table.rows or ()] == TEXTS
    assert all(type(row["text"]) is str for row in table.rows or ())


def test_a_missing_text_is_named() -> None:
    with pytest.raises(DataError, match="Series:2, column 'text': the text is missing"):
        unlabelled(pandas.Series(["a", None]))
    with pytest.raises(DataError, match="rows:1, column 'text': the text is missing"):
        unlabelled([float("nan"), "b"])


def test_images_with_and_without_labels() -> None:
    pixels = np.arange(4, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    assert unlabelled(pixels).images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]  # type: ignore[index]
    table = labelled((pixels, np.array([0, 1, 0, 1])))
    assert (table.labels, table.columns) == (["0", "1", "0", "1"], {"image": "image", "label": "label"})
    pictures = MapStyle([(Image.fromarray(each), at % 2) for at, each in enumerate(pixels)])
    pictures.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    assert labelled(pictures).labels == ["cat", "dog", "cat", "dog"]
    halves = torch.utils.data.Subset(pictures, [1, 2])
    assert labelled(halves).labels == ["dog", "cat"]
    assert unlabelled(halves).images[:, 0, 0, 0].tolist() == [1, 2]  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "words", "fix"),
    [
        (TEXTS, "rows: texts without labels", "data=(texts, labels)"),
        (pandas.Series(TEXTS), "Series: texts without labels", "data=(texts, labels)"),
        ({"text": TEXTS, "label": LABELS[:3]}, "columns of different lengths", "each row"),
        ((TEXTS, LABELS[:3]), "columns of different lengths", "each row"),
        ({"text": "one", "label": "good"}, "not one of columns", '[{"text"'),
        ({"train": "train.csv", "test": "test.csv"}, "'train.csv' in place of rows", "source: train.csv"),
        ([["a", "good"], ["b", "bad"]], "rows:1: the row is no dict", '{"text"'),
        (np.array(PAIRS), "ndarray:1: the row is no dict", "pandas.DataFrame(data"),
        ([*PAIRS, "alone"], "rows:5: the row is no dict", '{"text"'),
        ([], "rows: no rows", "give rows"),
        ((np.zeros((2, 3, 8, 8), np.uint8), [0, 1]), "rows:1: the row is no dict", "[height, width, channels]"),
        (MapStyle([(torch.zeros(3, 8, 8), 0)]), "Dataset:1: the row is no dict", "no fractions"),
        (np.array([b"a"]), "found bytes", "decode()"),
        (Stream([pandas.DataFrame(DICTS)]), "no dicts", "with_format(None)"),  # type: ignore[list-item]
        ([("a", "b", "c")], "rows:1: the row is no dict", '{"text"'),
        (torch.utils.data.DataLoader(MapStyle(PAIRS)), "a DataLoader gives batches", "data=loader.dataset"),
        (SimpleNamespace(toPandas=None), "data of type SimpleNamespace cannot be read", "data=data.toPandas()"),
    ],
)
def test_what_is_not_read_says_what_to_write(rows: object, words: str, fix: str) -> None:
    with pytest.raises(DataError) as caught:
        labelled(rows)
    assert words in str(caught.value)
    assert fix in caught.value.fix


def test_two_texts_a_row_are_not_taken_for_a_text_and_its_label() -> None:
    with pytest.raises(DataError, match="two texts a row"):
        unlabelled([("a man eats", "somebody eats")])


def test_two_columns_of_one_name() -> None:
    table = pyarrow.Table.from_arrays([TEXTS, LABELS, LABELS], names=["text", "label", "label"])
    with pytest.raises(DataError, match="two columns have one name"):
        labelled(table)


def test_texts_of_bytes_are_read_as_utf_8():
    rows = [{"text": text.encode(), "label": label} for text, label in (("一句话", "a"), ("b'quoted'", "b"))]
    assert read(DataPart(), rows=rows).texts == ["一句话", "b'quoted'"]
    with pytest.raises(DataError, match="rows:1, column 'text': bytes that are no text in UTF-8") as caught:
        read(DataPart(), rows=[{"text": "句".encode("gb18030"), "label": "a"}])
    assert ".str.decode('gb18030')" in caught.value.fix


def test_a_list_of_words_is_joined_and_not_written_out():
    with pytest.raises(DataError, match="the text is no text") as caught:
        read(DataPart(), rows=[{"text": ["a", "word"], "label": "a"}])
    assert ".str.join(' ')" in caught.value.fix
