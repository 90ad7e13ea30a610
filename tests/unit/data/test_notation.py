"""Numbers in another notation are read where only one reading is possible, told of, and asked for elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read
from paceline.data.sources.notation import read_numbers
from paceline.recipe.parts import DataPart


def table_of(labels, task="auto", **settings):
    rows = [{"text": f"text {at}", "score": label} for at, label in enumerate(labels)]
    return read(DataPart(**settings), task=task, rows=rows)


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["0,5", "1,0", "1,5", "2,0"], [0.5, 1.0, 1.5, 2.0]),
        (["3,5", "1.000,5", "2.137"], [3.5, 1000.5, 2137.0]),
        (["0,125", "1,250"], [0.125, 1.25]),
        (["1,000.5", "2,000", "37"], [1000.5, 2000.0, 37.0]),
        (["1.000.000,5", "1.000"], [1000000.5, 1000.0]),
        (["1 000,5", "12 000"], [1000.5, 12000.0]),
        (["1\xa0000,5", "12\u202f000"], [1000.5, 12000.0]),
        (["1'000.5", "12’000"], [1000.5, 12000.0]),
        (["1,00,000.5", "5,000"], [100000.5, 5000.0]),
        (["50%", "5%", "12.5 %"], [50.0, 5.0, 12.5]),
        (["12,5 %", "50 %"], [12.5, 50.0]),
        (["$5", "$1,200.50", "-$3"], [5.0, 1200.5, -3.0]),
        (["5,00 €", "1.200,50 €"], [5.0, 1200.5]),
        (["¥100", "￥200"], [100.0, 200.0]),
        (["100元", "200元"], [100.0, 200.0]),
        (["USD 5", "usd 7.5"], [5.0, 7.5]),
        (["３．５", "４"], [3.5, 4.0]),
        (["３，５", "４，０"], [3.5, 4.0]),
        (["５０％", "50%"], [50.0, 50.0]),
        (["½", "1", "1½"], [0.5, 1.0, 1.5]),
        (["−0.5", "−1.5", "2"], [-0.5, -1.5, 2.0]),
        (["٣٫٥", "٤"], [3.5, 4.0]),
        (["1,5e3", "2,5"], [1500.0, 2.5]),
    ],
)
def test_numbers_of_one_notation_are_targets(labels, numbers) -> None:
    for task in ("auto", "regression"):
        table = table_of(labels, task=task)
        assert (table.kind, table.labels) == ("regression", numbers)
        (notice,) = [notice for notice in table.notices if "is read as the number" in notice]
        assert notice.startswith("label column 'score': ")


@pytest.mark.parametrize(
    "labels", [["0.5", "1", "-2e1"], [0.5, 1, 2], ["1.000", "2.5"], ["0.125", "1.250"], ["1.5", "12.000"]]
)
def test_nothing_is_told_of_plain_numbers(labels) -> None:
    table = table_of(labels)
    assert table.labels == [float(label) for label in labels]
    assert not any("is read as the number" in notice for notice in table.notices)


def test_a_comma_that_may_mean_either_is_asked_for() -> None:
    labels = ["1,000", "2,137", "950"]
    for task in ("auto", "regression"):
        with pytest.raises(DataError, match="'1,000' is 1000 or 1\n") as caught:
            table_of(labels, task=task)
        assert "--set data.decimal=. where it is 1000, --set data.decimal=, where it is 1;" in caught.value.fix
    assert table_of(labels, decimal=".", task="regression").labels == [1000.0, 2137.0, 950.0]
    assert table_of(labels, decimal=",").labels == [1.0, 2.137, 950.0]
    assert table_of(labels, task="classification").labels == labels


def test_python_numbers_are_what_they_are() -> None:
    assert table_of([2.125, 1, "3,5", "4,5", "5,5"]).labels == [2.125, 1.0, 3.5, 4.5, 5.5]


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["1 000", "2 000", "1 000"], "classification"),
        (["1,0", "2,0", "1,0"], "classification"),
        (["½", "1"], "regression"),
        (["5%", "10%"], "regression"),
        (["$5", "$10"], "regression"),
        (["1,2,3", "1,3"], "classification"),
        (["1.2.3", "1.2.4"], "classification"),
        (["12-34", "56-78"], "classification"),
        (["a1", "b2"], "classification"),
        (["5%5", "%"], "classification"),
    ],
)
def test_few_whole_numbers_stay_classes_as_written(labels, kind) -> None:
    table = table_of(labels)
    assert table.kind == kind
    if kind == "classification":
        assert table.labels == labels


def test_the_notation_of_most_rows_counts() -> None:
    numbers = read_numbers(Counter({"3.5": 9, "2.5": 9, "1,5": 1, "1,000": 1, "50%": 1}))
    assert numbers.values == {"3.5": 3.5, "2.5": 2.5, "1,000": 1000.0}
    assert (numbers.unusual, numbers.mark, numbers.ambiguous) == ("1,000", "", "")


@pytest.mark.parametrize(
    ("labels", "found", "fix"),
    [
        (["3.5"] * 20 + ["1,5"], "'1,5'", "write 1.5;"),
        (["3,5"] * 20 + ["1.5"], "'1.5'", "write a number, as the others are written ('3,5', for example)"),
        (["5%"] * 20 + ["12"], "'12'", "as the others are written ('5%', for example)"),
        (["3.5"] * 20 + ["many"], "'many'", "as the others are written ('3.5', for example)"),
    ],
)
def test_a_cell_in_another_notation_than_the_others_is_refused(labels, found, fix) -> None:
    with pytest.raises(DataError, match=f"rows:21, column 'score': mixed label types .found {found}") as caught:
        table_of(labels)
    assert fix in caught.value.fix


@pytest.mark.parametrize("labels", [["50%", "0.5"], ["$5", "€5", "$6"], ["3,5", "2.5"], ["5%", "5", "6"]])
def test_numbers_in_several_notations_are_no_classes(labels) -> None:
    with pytest.raises(DataError, match="column 'score': numbers in several notations: '") as caught:
        table_of(labels)
    assert "task.type=classification" in caught.value.fix
    assert table_of(labels, task="classification").labels == labels


def test_a_point_that_may_stand_before_thousands_is_told_of() -> None:
    table = table_of(["1.000", "2.500", "12.000"])
    assert table.labels == [1.0, 2.5, 12.0]
    assert any(
        "'1.000' is read as the number 1 (--set data.decimal=, reads 1000)" in notice for notice in table.notices
    )
    assert table_of(["1.000", "2.500"], decimal=",", task="regression").labels == [1000.0, 2500.0]


def test_numbers_of_classes_joined_by_a_comma_are_asked_for() -> None:
    labels = ["1,2", "2", "1", "1,3", "3"]
    with pytest.raises(DataError, match=r"'1,2' is 1\.2, or labels 1 and 2") as caught:
        table_of(labels)
    assert "--set data.label_separator=, for several" in caught.value.fix
    assert table_of(labels, label_separator=",").labels == [("1", "2"), ("2",), ("1",), ("1", "3"), ("3",)]
    assert table_of(labels, decimal=",").labels == [1.2, 2.0, 1.0, 1.3, 3.0]
    halves = ["1", "1,5", "2", "2,5", "3", "3,5", "4", "4,5", "5"]
    assert table_of(halves).kind == "regression"


@pytest.mark.parametrize("missing", ["n/a", "NA", "-"])
def test_missing_values_do_not_make_classes_of_numbers(missing: str) -> None:
    for labels in (["50%", "60%", missing], ["1.5", "2.5", missing]):
        with pytest.raises(DataError, match=f"rows:3, column 'score': mixed label types .found '{missing}'") as caught:
            table_of(labels)
        assert "as the others are written" in caught.value.fix
    assert table_of(["1", "2", missing]).labels == ["1", "2", missing]
