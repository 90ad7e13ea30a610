"""Lists as labels: by place where they hold 0 and 1, names otherwise, and asked for where they can be either."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from paceline.contract.errors import DataError
from paceline.data.sources import read
from paceline.recipe.parts import DataPart


def table_of(labels, task="auto", column="labels", **settings):
    rows = [{"text": f"text {at}", column: label} for at, label in enumerate(labels)]
    return read(DataPart(**settings), task=task, rows=rows)


HOT = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
NAMED = [("0", "2"), ("1",), (), ("0", "1", "2")]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda row: [float(bit) for bit in row],
        lambda row: [bool(bit) for bit in row],
        lambda row: np.array(row, dtype=np.float32),
        lambda row: np.array(row, dtype=np.uint8),
        lambda row: np.array(row, dtype=bool),
        lambda row: [str(bit) for bit in row],
        lambda row: [np.int64(bit) for bit in row],
        str,
        lambda row: str(tuple(row)),
        lambda row: str(np.array(row)),
        lambda row: str(np.array(row, dtype=float)),
        lambda row: repr(np.array(row)),
        lambda row: str(torch.tensor(row)),
        lambda row: json.dumps([bool(bit) for bit in row]),
    ],
)
def test_lists_of_0_and_1_are_read_by_place(kind) -> None:
    table = table_of([kind(row) for row in HOT])
    assert (table.kind, table.labels) == ("multi_label", NAMED)
    (notice,) = [notice for notice in table.notices if "by place" in notice]
    assert "lists of 3 zeros and ones" in notice
    assert "as labels 0, 1, 2; --set data.label=[NAME,NAME,...] names them" in notice


def test_json_lines_and_parquet_are_read_by_place(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = [json.dumps({"text": "t", "labels": row}) for row in HOT]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    parquet.write_table(pyarrow.table({"text": ["t"] * 4, "labels": HOT}), tmp_path / "a.parquet")
    for file in ("a.jsonl", "a.parquet"):
        assert read(DataPart(source=str(tmp_path / file))).labels == NAMED


@pytest.mark.parametrize("separator", [",", " "])
def test_what_a_separator_cuts_into_0_and_1_is_read_by_place(separator: str) -> None:
    joined = [separator.join(map(str, row)) for row in HOT]
    assert table_of(joined, label_separator=separator).labels == NAMED
    bracketed = [str(row) for row in HOT]
    assert table_of(bracketed, label_separator=separator).labels == NAMED


def test_a_list_of_names_names_the_places() -> None:
    table = table_of(HOT, label=("slow", "rude", "dear"))
    assert table.labels == [("slow", "dear"), ("rude",), (), ("slow", "rude", "dear")]
    assert table.columns["label"] == "labels"


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (HOT, ("slow", "rude"), r"\[slow, rude\]: no such columns(.|\n)*'labels' holds lists of 3"),
        (["a", "b", "a"], ("slow", "rude"), r"\[slow, rude\]: no such columns(.|\n)*holds no lists of 0 and 1"),
        ([["a"], ["b"]], ("slow", "rude"), r"holds no lists of 0 and 1"),
    ],
)
def test_names_that_fit_no_places_are_refused(labels, names, message) -> None:
    with pytest.raises(DataError, match=message):
        table_of(labels, label=names)


def test_a_misspelt_column_is_no_place() -> None:
    rows = [{"text": "t", "slow": 0, "rude": 1, "label": 0}, {"text": "u", "slow": 1, "rude": 0, "label": 1}]
    with pytest.raises(DataError, match=r"no column 'rud'(.|\n)*did you mean 'rude'"):
        read(DataPart(label=("slow", "rud")), rows=rows)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([[3, 17], [17], [3]], [("3", "17"), ("17",), ("3",)]),
        ([[0], [1], [0, 1], []], [("0",), ("1",), ("0", "1"), ()]),
        ([[0, 2], [1, 2]], [("0", "2"), ("1", "2")]),
        ([["0", "1"], ["1"], ["0"]], [("0", "1"), ("1",), ("0",)]),
        ([["a", "b"], ["b", "b"]], [("a", "b"), ("b",)]),
        ([["a", 1], ["b"]], [("a", "1"), ("b",)]),
    ],
)
def test_lists_of_names_and_numbers_of_classes_stay_names(labels, expected) -> None:
    table = table_of(labels)
    assert table.labels == expected
    assert not any("by place" in notice for notice in table.notices)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0], [1], [1]], "each list holds one 0 or 1(.|\n)*task.type=classification"),
        ([[True], [False]], "each list holds one 0 or 1"),
        ([[1, 0, 1], [0, 1]], "different lengths(.|\n)*write a 0 or 1 for every class"),
        ([[1.0], [0.0, 1.0]], "different lengths"),
        ([[0.1, 0.9], [0.5, 0.5]], "fractions name no classes"),
        ([[3, 17, 0, 0], [5, 0, 0, 0]], "padded, or measurements"),
        ([[1, -1, 1], [-1, -1, 1]], "padded, or measurements"),
    ],
)
def test_numbers_that_can_be_either_are_asked_for(labels, message) -> None:
    with pytest.raises(DataError, match=f"lists of numbers that are no names of classes(.|\n)*{message}") as caught:
        table_of(labels)
    assert caught.value.column == "labels"


def test_one_label_a_list_is_read_where_that_was_asked_for() -> None:
    assert table_of([[0], [1], [1]], task="classification").labels == ["0", "1", "1"]
    assert table_of([["a"], ["b"]], task="classification").labels == ["a", "b"]
    table = table_of([[0, 0, 1], [1, 0, 0]], task="classification")
    assert (table.kind, table.labels) == ("classification", ["2", "0"])
    (notice,) = [notice for notice in table_of([[0, 0, 1], [1, 0, 0]]).notices if "by place" in notice]
    assert "each row has one: --set task.type=classification" in notice
    with pytest.raises(DataError, match="takes one label a row"):
        table_of(HOT, task="classification")


def test_a_place_that_is_never_1_is_told_of() -> None:
    (notice,) = [notice for notice in table_of([[1, 0, 0], [1, 0, 1], [0, 0, 1]]).notices if "by place" in notice]
    assert notice.endswith("1 in no row, and left out: 1")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["['slow', 'rude']", "['kind']", "[]"], [("slow", "rude"), ("kind",), ()]),
        (['["slow"]', '["it\'s", "slow"]', '["\\u4f60"]'], [("slow",), ("it's", "slow"), ("你",)]),
        (["('slow',)", "('slow', 'rude')", "()"], [("slow",), ("slow", "rude"), ()]),
        (["{'slow', 'rude'}", "{'kind'}", "set()"], [("slow", "rude"), ("kind",), ()]),
        (["['slow' 'rude']", "['kind']"], [("slow", "rude"), ("kind",)]),
        (["array(['slow', 'rude'], dtype=object)", "array([], dtype=object)"], [("slow", "rude"), ()]),
        (['{"slow": 1, "rude": 0}', '{"slow": 1, "rude": true}', "{}"], [("slow",), ("slow", "rude"), ()]),
        ([{"slow": 1, "rude": 0}, {"slow": 1, "rude": 1}], [("slow",), ("slow", "rude")]),
        ([{"b"}, frozenset({"a"})], [("b",), ("a",)]),
        (["[3, 17]", "[17]"], [("3", "17"), ("17",)]),
        ([b"good", b"bad"], ["good", "bad"]),
        ([[b"good"], [b"bad", "good"]], [("good",), ("bad", "good")]),
    ],
)
def test_a_list_in_a_cell_is_read(labels, expected) -> None:
    assert table_of(labels).labels == expected


def test_a_list_that_stood_in_a_cell_as_text_is_told_of() -> None:
    notices = table_of(["['slow', 'rude']", "['kind']"]).notices
    assert any("cells such as \"['slow', 'rude']\" are read as lists of labels" in notice for notice in notices)
    assert any("task: multi_label (guessed" in notice for notice in notices)
    assert not any("cells such as" in notice for notice in table_of([["slow"], ["kind"]]).notices)


@pytest.mark.parametrize("name", ["[unk]", "(none)", "[a, b]", "(1)", "[None]", "{a}", "['a'", "['a']['b']", "[[1]]"])
def test_other_names_in_brackets_stay_names(name: str) -> None:
    assert table_of([name, "b", name]).labels == [name, "b", name]


def test_a_few_lists_among_names_stay_names() -> None:
    assert table_of(["good", "bad", "bad", "['good']"]).labels == ["good", "bad", "bad", "['good']"]
    with pytest.raises(DataError, match=r"rows:3, column 'labels': mixed label types \(found 'bad'\)"):
        table_of(["['good']", "['bad']", "bad"])


@pytest.mark.parametrize("label", [{"a": 0.5}, {"name": "a"}, [None], [float("nan")], [["a"]], b"\xff\xfe", object()])
def test_what_is_no_label_is_refused(label) -> None:
    with pytest.raises(DataError, match="rows:2, column 'labels': the label is of no usable type"):
        table_of(["a", label])
