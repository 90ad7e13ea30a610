"""What a label column holds decides the task; class names stay as they are written."""

import json

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read
from paceline.recipe.parts import DataPart


def table_of(tmp_path, labels, task="auto", **settings):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"t{n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    return read(DataPart(source=str(file), **settings), task=task)


@pytest.mark.parametrize(
    ("labels", "kind", "expected"),
    [
        (["a", " b ", "a"], "classification", ["a", "b", "a"]),
        ([1, 0, 1], "classification", ["1", "0", "1"]),
        ([1.0, 0.0, 1.0], "classification", ["1.0", "0.0", "1.0"]),
        (["01", "1", "1.0"], "classification", ["01", "1", "1.0"]),
        ([True, False], "classification", ["true", "false"]),
        (["NA", "nan", "None"], "classification", ["NA", "nan", "None"]),
        ([0.5, 1, 2], "regression", [0.5, 1.0, 2.0]),
        (["0.5", "1", "-2e1"], "regression", [0.5, 1.0, -20.0]),
        (list(range(21)), "regression", [float(n) for n in range(21)]),
        (list(range(20)), "classification", [str(n) for n in range(20)]),
        ([n % 21 for n in range(200)], "classification", [str(n % 21) for n in range(200)]),
        ([["a", "b"], [], ["b", "b"]], "multi_label", [("a", "b"), (), ("b",)]),
        ([[1, 2], [2]], "multi_label", [("1", "2"), ("2",)]),
        (["1_0", "2_0"], "classification", ["1_0", "2_0"]),
    ],
)
def test_task_is_inferred(tmp_path, labels, kind, expected):
    table = table_of(tmp_path, labels)
    assert table.kind == kind
    assert table.labels == expected
    assert [type(label) for label in table.labels] == [type(label) for label in expected]


def test_inference_is_told_with_the_way_out(tmp_path):
    assert any("task: regression (guessed" in notice for notice in table_of(tmp_path, [0.5, 1]).notices)
    assert any("task: classification (guessed" in notice for notice in table_of(tmp_path, [1, 2]).notices)
    assert not any("task:" in notice for notice in table_of(tmp_path, ["a", "b"]).notices)
    assert not any("task:" in notice for notice in table_of(tmp_path, [1, 2], task="regression").notices)


def test_a_task_that_is_given_holds(tmp_path):
    assert table_of(tmp_path, [1, 2], task="regression").labels == [1.0, 2.0]
    assert table_of(tmp_path, [0.5, 1.5], task="classification").labels == ["0.5", "1.5"]
    assert table_of(tmp_path, [1, "2.5"], task="regression").labels == [1.0, 2.5]


def test_separator_makes_several_labels(tmp_path):
    table = table_of(tmp_path, ["a; b", "", "b;b;", "c"], label_separator=";")
    assert table.kind == "multi_label"
    assert table.labels == [("a", "b"), (), ("b",), ("c",)]


def test_indicator_columns_make_several_labels(tmp_path):
    (tmp_path / "a.csv").write_text("text,toxic,rude\na,0,1\nb,1,1.0\nc,false,0\n")
    table = read(DataPart(source=str(tmp_path / "a.csv"), label=("toxic", "rude")))
    assert (table.kind, table.labels) == ("multi_label", [("rude",), ("toxic", "rude"), ()])
    assert table.columns["label"] == "toxic,rude"


def test_one_number_in_two_spellings_is_pointed_out(tmp_path):
    assert any("'1' and '1.0' are one number" in notice for notice in table_of(tmp_path, ["1", "1.0", "0"]).notices)
    assert not any("one number" in notice for notice in table_of(tmp_path, ["1", "0"]).notices)


def test_unseen_label_of_a_set_is_found(tmp_path):
    from paceline.contract.errors import DataError

    file = tmp_path / "a.jsonl"
    rows = [("train", ["a"]), ("train", ["b"]), ("test", ["a", "c"])]
    file.write_text("".join(json.dumps({"text": "t", "label": x, "split": split}) + "\n" for split, x in rows))
    with pytest.raises(DataError, match=r"a.jsonl:3, column 'label': a class that is missing from train \(found 'c'\)"):
        read(DataPart(source=str(file)))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["pos", "neg", "pos ", "\xa0neg", "pos "], "3 labels: a.jsonl:3 has 'pos ', which counts as 'pos'"),
        (["pos", "neg", "pos\u3000"], "1 label: a.jsonl:3 has 'pos\\u3000', which counts as 'pos'"),
        ([["a", "b"], ["b", " a"], ["a "]], "2 labels: a.jsonl:2 has ' a', which counts as 'a'"),
    ],
)
def test_blanks_that_are_left_out_of_labels_are_told(tmp_path, labels, told):
    (notice,) = [notice for notice in table_of(tmp_path, labels).notices if "blanks" in notice]
    assert notice.replace(f"{tmp_path}/", "") == f"blanks are left out around {told}"


@pytest.mark.parametrize(
    ("labels", "settings"),
    [
        (["pos", "neg", "po s"], {}),
        (["a; b", "b ;a", "a"], {"label_separator": ";"}),
        ([" 0.5", "1.5 ", "2"], {}),
        ([1, 0, 1], {}),
    ],
    ids=["none", "around separators", "numbers to learn", "no text"],
)
def test_nothing_is_told_of_blanks_that_mean_nothing(tmp_path, labels, settings):
    assert not [notice for notice in table_of(tmp_path, labels, **settings).notices if "blanks" in notice]


@pytest.mark.parametrize(("unseen", "means"), [("1.0", "is the same number"), ("True", "means the same")])
def test_an_unseen_class_that_means_another_is_told_so(tmp_path, unseen, means):
    file = tmp_path / "a.jsonl"
    rows = [("train", "0"), ("train", "1"), ("test", unseen)]
    file.write_text("".join(json.dumps({"text": "t", "label": x, "split": split}) + "\n" for split, x in rows))
    with pytest.raises(DataError, match=rf"missing from train \(found '{unseen}'\)(.|\n)*'1' {means}, another class"):
        read(DataPart(source=str(file)))


def test_a_separator_that_stands_in_no_label_is_told_of(tmp_path):
    (notice,) = [n for n in table_of(tmp_path, ["a b", "b", "c"], label_separator=";").notices if "separator" in n]
    assert notice == "data.label_separator = ';' stands in no label: no row has more than one"
    assert not any("separator" in n for n in table_of(tmp_path, ["a;b", "b"], label_separator=";").notices)


@pytest.mark.parametrize("others", [["a", "b"], [["a"], ["b", "a"]]])
def test_a_missing_label_among_words_is_empty(others):
    from paceline.contract.errors import DataError

    rows = [{"text": "t", "label": label} for label in [*others, float("nan")]]
    with pytest.raises(DataError, match="rows:3, column 'label': the label is empty"):
        read(DataPart(), rows=rows)


def test_decimals_of_a_database_are_numbers():
    from decimal import Decimal

    table = read(DataPart(), rows=[{"text": "t", "label": Decimal(text)} for text in ("3.50", "4")])
    assert (table.kind, table.labels) == ("regression", [3.5, 4.0])


def test_many_bit_strings_are_no_numbers_to_learn(tmp_path):
    bits = [f"{number:06b}" for number in range(60)]
    with pytest.raises(DataError, match="labels of zeros and ones alone") as caught:
        table_of(tmp_path, bits)
    assert "task.type=classification" in caught.value.fix
    assert table_of(tmp_path, bits, task="classification").labels == bits
    assert table_of(tmp_path, bits, task="regression").kind == "regression"
    several = table_of(tmp_path, [",".join(row) for row in bits], label_separator=",")
    assert (several.kind, several.labels[3]) == ("multi_label", ("4", "5"))
