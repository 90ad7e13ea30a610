"""Names of classes that datasets keeps beside class numbers are never lost, wherever they are kept."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled
from paceline.recipe.parts import DataPart

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ["neg", "pos"]
LABEL = {"names": NAMES, "_type": "ClassLabel"}
ONE = [{"text": f"text {number}", "label": number % 2} for number in range(4)]
SEVERAL = [{"text": f"text {number}", "label": labels} for number, labels in enumerate([[0, 1], [1], [], [0]])]
ONE_NAMED, SEVERAL_NAMED = ["neg", "pos", "neg", "pos"], [("neg", "pos"), ("pos",), (), ("neg",)]


class Dataset:
    """The part of datasets.Dataset that is asked for."""

    def __init__(self, rows: list[dict[str, Any]], feature: Any) -> None:
        self._rows, self.features, self.column_names = (
            rows,
            {"text": SimpleNamespace(), "label": feature},
            ["text", "label"],
        )

    def __iter__(self) -> Any:
        return (dict(row) for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self._rows]


CLASS_LABEL = SimpleNamespace(names=NAMES, int2str=NAMES.__getitem__)
LISTS = {"Sequence": SimpleNamespace(feature=CLASS_LABEL), "list": [CLASS_LABEL]}
WRITTEN_LISTS = [{"feature": LABEL, "_type": "Sequence"}, {"feature": LABEL, "_type": "List"}, [LABEL]]


def table_of(rows: list[dict[str, Any]], feature: Any) -> Any:
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": feature}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)


def test_a_parquet_file(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table_of(ONE, LABEL), path)
    assert read(DataPart(source=str(path))).labels == ONE_NAMED
    parquet.write_table(table_of([*ONE, {"text": "unlabelled", "label": -1}], LABEL), path)
    with pytest.raises(DataError, match=r"a.parquet:5, column 'label': the label is empty"):
        read(DataPart(source=str(path)))
    parquet.write_table(table_of([{"text": "a", "label": 7}], LABEL), path)
    with pytest.raises(DataError, match=r"a.parquet:1, column 'label': a class number without a name \(found '7'\)"):
        read(DataPart(source=str(path)))


@pytest.mark.parametrize("feature", WRITTEN_LISTS)
def test_lists_in_a_parquet_file_and_a_table(tmp_path, feature) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table_of(SEVERAL, feature), path)
    table = read(DataPart(source=str(path)))
    assert (table.kind, table.labels) == ("multi_label", SEVERAL_NAMED)
    assert read(DataPart(), rows=table_of(SEVERAL, feature)).labels == SEVERAL_NAMED


def test_a_table_in_memory() -> None:
    assert read(DataPart(), rows=table_of(ONE, LABEL)).labels == ONE_NAMED


def test_a_data_set_in_memory() -> None:
    assert read(DataPart(), rows=Dataset(ONE, CLASS_LABEL)).labels == ONE_NAMED
    with pytest.raises(DataError, match="Dataset:1, column 'label': a class number without a name"):
        read(DataPart(), rows=Dataset([{"text": "a", "label": 2}], CLASS_LABEL))


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_lists_of_a_data_set_in_memory(kind, form) -> None:
    rows = [{**row, "label": form(row["label"])} for row in SEVERAL]
    table = read(DataPart(), rows=Dataset(rows, LISTS[kind]))
    assert (table.kind, table.labels) == ("multi_label", SEVERAL_NAMED)


def test_splits_of_lists_are_not_looked_at_for_marks_of_missing_labels() -> None:
    table = read(DataPart(), rows={"train": Dataset(SEVERAL, LISTS["list"]), "test": Dataset(SEVERAL, LISTS["list"])})
    assert table.splits == ["train"] * 4 + ["test"] * 4


def test_rows_to_predict_for_may_lack_labels(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table_of([{"text": "a", "label": -1}], LABEL), path)
    (table,) = read_unlabelled(DataPart(source=str(path)), 10, tell=lambda notice: None)
    assert table.texts == ["a"]
