"""What is most likely a mistake in labels is told in one line each, with counts and an example's place."""

import pytest

from paceline.data.doubts import doubts
from paceline.data.sources import read
from paceline.data.splits import duplicate_keys, split_rows
from paceline.recipe.parts import DataPart


def told(rows, task="auto", **settings):
    part = DataPart(source="memory", **settings)
    table = read(part, task=task, rows=[{"text": text, "label": label} for text, label in rows])
    keys = duplicate_keys(table)
    return list(doubts(table, keys, split_rows(table.labels, table.kind, keys, table.splits, part.splits).splits))


def plain(count, labels=("pos", "neg")):
    return [(f"text {number}", labels[number % len(labels)]) for number in range(count)]


def test_there_is_no_doubt_about_clean_data():
    assert told(plain(20)) == []
    assert told([*plain(20), ("text 0", "pos")]) == []
    assert told([(f"text {number}", number + 0.5) for number in range(20)]) == []


def test_texts_with_different_labels_are_counted_with_an_example():
    (line,) = told([*plain(20), ("TEXT  0", "neg"), ("text 0", "neg"), ("text 5", "pos")])
    assert line == ("2 texts occur more than once with different labels (5 rows): rows:1 has 'pos', rows:21 has 'neg'")
    (line,) = told([*plain(20), ("text 3", "pos")])
    assert line.startswith("1 text occurs more than once with different labels (2 rows): rows:4 has 'neg'")


def test_sets_of_labels_are_compared_without_their_order():
    several = [(f"text {number}", ["a", "b"] if number % 2 else ["a"]) for number in range(20)]
    assert told([*several, ("text 1", ["b", "a"])]) == []
    (line,) = told([*several, ("text 1", ["b"])])
    assert "1 text occurs more than once" in line


@pytest.mark.parametrize("other", ["Pos", "p os", "pos\u200b", "ｐｏｓ"])
def test_spellings_of_one_class_are_named(other):
    (line,) = told([*plain(20), ("x", other), ("y", other)])
    assert line.startswith("labels that differ only by case, blanks or invisible characters count as different classes")
    assert f"'pos' (10 rows) and {other!r} (2 rows)" in line


@pytest.mark.parametrize("name", ["nan", "None", "NULL", "n/a", "-", "无"])
def test_a_class_called_like_a_missing_value(name):
    (line,) = told([*plain(20), ("x", name), ("y", name)])
    assert f"called like a missing value: {name!r} (2 rows)" in line


@pytest.mark.parametrize(
    "name", ["2024-05-01", "2024-05-01 00:00:00", "1/5/2024", "05.01.24", "2-Jan", "Jan-24", "2024年5月1日", "5月1日"]
)
def test_labels_that_look_like_dates(name):
    (line,) = told([*plain(20), ("x", name), ("y", name)])
    assert line.startswith(f"labels that look like dates: {name!r}; is 'label' the column")


@pytest.mark.parametrize("name", ["may", "1-2", "1.5.2", "v2024", "march 5 of 7"])
def test_other_labels_are_no_dates(name):
    assert not told([*plain(20), ("x", name), ("y", name)])


def test_classes_of_one_row_are_named_with_it():
    (line,) = told([*plain(20), ("x", "odd")])
    assert line.startswith("1 class has a single row")
    assert line.endswith("'odd' (rows:21)")
    (line,) = told([*plain(20), *[(name, name) for name in "abcde"]])
    assert line.startswith("5 classes have a single row")
    assert line.endswith("'a' (rows:21), 'b' (rows:22), 'c' (rows:23) and 2 more")


def test_what_guessing_one_class_gives():
    lopsided = [(f"text {number}", "bad" if number < 5 else "fine") for number in range(100)]
    (line,) = told(lopsided, splits={"train": None, "validation": 0, "test": 0})
    assert line.startswith("95 of 100 training rows are 'fine': always guessing it gives an accuracy of 0.950")
    assert told([*lopsided, ("x", "bad")], splits={"train": None, "validation": 0, "test": 0}) == []


def test_many_doubts_are_still_one_line_each():
    rows = [(f"text {number}", f"{kind} {number % 50}") for number in range(200) for kind in ("A", "a")]
    lines = told(rows, task="classification")
    assert len(lines) == 2
    assert all(len(line) < 400 and "\n" not in line for line in lines)
    assert "and 47 more" in lines[1]
