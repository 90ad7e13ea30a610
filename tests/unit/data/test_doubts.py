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
    assert line.startswith(f"labels that look like dates or times: {name!r}; is 'label' the column")


@pytest.mark.parametrize(
    "name", ["10:30", "9:05:59", "10:30 am", "11 PM", "01:02:03.5", "10h30", "上午10:30", "10时30分"]
)
def test_labels_that_look_like_times(name):
    (line,) = told([*plain(20), ("x", name), ("y", name)])
    assert line.startswith(f"labels that look like dates or times: {name!r}; is 'label' the column")


@pytest.mark.parametrize(
    "name", ["may", "1-2", "1.5.2", "v2024", "march 5 of 7", "2:1", "16:9", "am", "10:305", "99:99"]
)
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


@pytest.mark.parametrize(
    "name",
    ["['good']", '["good", "bad"]', "[0, 1]", "b'good'", "('a', 'b')", "{'a': 0.3}", "[0", "'good'", '"good"', "a]"],
)
def test_labels_that_were_lists_or_bytes(name):
    lines = told([*plain(40), ("x", name), ("y", name)], task="classification")
    (line,) = [line for line in lines if "written as text" in line]
    assert repr(name) in line


@pytest.mark.parametrize("name", ["[unk]", "(good)", "it's", "a [b]", "b", "{x}", "(1)", "don't say 'never'"])
def test_other_marks_in_labels_are_no_doubt(name):
    assert not told([*plain(20), ("x", name), ("y", name)])


@pytest.mark.parametrize(
    "text",
    ["['a', 'word']", '["a"]', "b'a word'", 'b"it\'s"', '{"text": "a"}', "('a', 'b')", "[101, 2023]", "array(['a'])"],
)
def test_texts_that_were_lists_bytes_or_objects(text):
    rows = [(text if number == 3 else f"text {number}", ("pos", "neg")[number % 2]) for number in range(10)]
    (line,) = told(rows)
    assert line.startswith("1 of 10 texts look like a list, bytes or an object written as text: rows:4 has ")
    assert told([(text, number + 0.5) for text, number in zip([text, "a", "b"], range(3), strict=True)])


@pytest.mark.parametrize("text", ["[1] said so in [2]", "it's b'", "(see 'a')", "array", "'quoted'", "[unk] a ]", "b'"])
def test_other_texts_are_no_doubt(text):
    assert told([(text, "pos"), *plain(8)]) == []


@pytest.mark.parametrize(
    "names",
    [
        *(("5 stars", "1 star"), ("10kg", "5kg"), ("4/5", "5/5"), ("1年", "2年"), (">5", ">10"), ("5+", "3+")),
        *(("4.5 out of 5", "3 out of 5"), ("1 star out of 5", "4 stars out of 5"), ("4,5 von 5", "3 von 5")),
        *(
            ("满分5分得4分", "满分5分得3分"),
            ("Rating: 4.5", "Rating: 3"),
            ("score=3.5", "score=4"),
            ("4 of 5 ★", "3 of 5 ★"),
        ),
        *(("10 g", "5 kg"), ("1h 30m", "45 min"), ("1/2", "3/4"), ("2 days", "1 week")),
    ],
)
def test_numbers_with_a_unit_are_classes_in_doubt(names):
    (line,) = told(plain(20, names))
    assert line.startswith("labels that look like numbers with a unit are classes")
    assert "task.type=regression" in line


@pytest.mark.parametrize(
    "names",
    [
        *(("1", "2"), ("class 1", "class 2"), ("1st", "2nd"), ("5 stars", "bad"), ("v1", "v2"), ("18-24", "25-34")),
        *(("1e3", "2e3"), ("10%-20%", "20%-30%")),
        *(("4 out of 5", "good"), ("1a", "2b"), ("top 5 of 10", "last 5 of 10"), ("1.5.2", "1.5.3")),
    ],
)
def test_other_numbers_are_no_units(names):
    assert not told(plain(20, names))


@pytest.mark.parametrize(
    "names", [("0101", "1100", "0011"), ("010", "110"), ("00", "01", "10", "11"), ("1", "11", "101", "1000")]
)
def test_bits_without_anything_between_them(names):
    lines = told(plain(40, names))
    (line,) = [line for line in lines if "0 or 1 for each class" in line]
    assert repr(names[0]) in line


@pytest.mark.parametrize(
    "names", [("0", "1"), ("10", "11"), ("1", "10"), ("0", "10", "20"), ("001", "002"), ("101", "b")]
)
def test_other_numbers_of_zeros_and_ones_are_no_bits(names):
    assert not told(plain(40, names))


@pytest.mark.parametrize("names", [("51.5, -0.1", "48.8, 2.3"), ("1 20 3", "4 5 60"), ("(1.5; 2)", "(3; 4.5)")])
def test_several_numbers_in_a_cell(names):
    (line,) = told(plain(40, names), task="classification")
    assert line.startswith("labels that look like several numbers")


@pytest.mark.parametrize(
    ("names"), [("True", "1", "False", "0"), ("yes", "1", "no"), ("TRUE", "Y", "n"), ("t", "true")]
)
def test_truths_written_in_several_ways(names):
    (line,) = [line for line in told(plain(40, names)) if "most likely mean the same" in line]
    assert repr(names[0]) in line


@pytest.mark.parametrize("names", [("yes", "no", "maybe"), ("0", "1", "2"), ("t", "f"), ("y", "n"), ("yes", "0")])
def test_other_answers_are_no_doubt(names):
    assert not told(plain(40, names))


@pytest.mark.parametrize(
    ("mark", "setting"),
    [
        ("#", "--set 'data.label_separator=#'"),
        (", ", "--set data.label_separator=,"),
        ("|", "--set 'data.label_separator=|'"),
        ("\t", r"--set 'data.label_separator=\t'"),
        ("~", "--set 'data.label_separator=~'"),
        ("/", "--set data.label_separator=/"),
        ("-", "--set data.label_separator=-"),
        (" ", "--set 'data.label_separator= '"),
    ],
)
def test_classes_that_are_joined_names(mark, setting):
    (line,) = told(plain(20, ("slow", f"slow{mark}rude", "rude", "kind")))
    assert repr(f"slow{mark}rude") in line
    assert f"{setting} cuts them" in line


@pytest.mark.parametrize(
    "names",
    [
        ("Sci/Tech", "World"),
        ("New York, NY", "Albany, NY"),
        ("a-b", "a", "c"),
        ("very good", "good", "very bad", "bad"),
        ("1,000", "1,000,000", "950"),
        ("0-5", "6-10"),
    ],
)
def test_other_classes_are_not_joined(names):
    assert not told(plain(20, names))


@pytest.mark.parametrize("names", [("0 1 0", "1 1 0"), ("0|1|0", "1|0|0"), ("__label__a __label__b", "__label__c")])
def test_labels_that_a_program_joined(names):
    (line,) = told(plain(20, names))
    assert "look like several ones joined by" in line


def test_labels_that_are_all_in_brackets():
    (line,) = told(plain(20, ("{slow,rude}", "{slow}")))
    assert line.startswith("labels that look like a list")
    (line,) = told(plain(20, ("[slow, rude]", "[slow]")))
    assert line.startswith("labels that look like a list")
