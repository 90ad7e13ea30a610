"""Data for token classification are refused by name, in the shapes in which people have them."""

import json

import pytest

from paceline.data.sources import read
from paceline.errors import DataError
from paceline.recipe.parts import DataPart

SENTENCES = [
    (["Anna", "met", "Max", "in", "Berlin"], ["B-PER", "O", "B-PER", "O", "B-LOC"]),
    (["It", "rained", "all", "day", "."], ["O", "O", "O", "O", "O"]),
    (["Peter", "Smith", "laughed"], ["B-PER", "I-PER", "O"]),
    (["No", "one", "came"], ["O", "O", "O"]),
]
NUMBERS = {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3}
PARTS = {"B-PER": "PROPN", "I-PER": "PROPN", "B-LOC": "PROPN", "O": "X"}


def shapes():
    def conll(words, tags):
        numbers = [NUMBERS[tag] for tag in tags]
        return {"id": "0", "tokens": words, "pos_tags": numbers, "ner_tags": numbers}

    return {
        "lists of numbers beside tokens": (conll, {}),
        "lists of names": (lambda words, tags: {"tokens": words, "ner_tags": tags}, {}),
        "a label column of lists": (lambda words, tags: {"text": " ".join(words), "label": tags}, {}),
        "a named column of lists": (
            lambda words, tags: {"text": " ".join(words), "x": [NUMBERS[tag] for tag in tags]},
            {"label": "x"},
        ),
        "text between blanks": (lambda words, tags: {"text": " ".join(words), "labels": " ".join(tags)}, {}),
        "parts of speech": (
            lambda words, tags: {"sentence": " ".join(words), "label": " ".join(PARTS[tag] for tag in tags)},
            {},
        ),
    }


@pytest.mark.parametrize("shape", shapes())
def test_tags_of_words_are_refused_by_name(tmp_path, shape):
    row, settings = shapes()[shape]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(*sentence)) + "\n" for sentence in SENTENCES * 3))
    with pytest.raises(DataError, match="token classification is not supported") as caught:
        read(DataPart(source=str(path), **settings))
    assert "paceline classifies whole texts" in caught.value.why
    assert caught.value.column in ("ner_tags", "pos_tags", "label", "labels", "x")


def rows_of(**columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    "rows",
    [
        # several labels of a text, as many as it has words
        rows_of(text=["good film", "so bad", "fine"], label=[["a", "b"], ["b", "a"], ["a"]]),
        # a copy of the text
        rows_of(
            text=["a film a day", "so bad so bad", "fine"],
            text_clean=["a film a day", "so bad so bad", "fine"],
            label=[*"xyx"],
        ),
        # tags that are there, and are not what is learned
        [
            {"text": " ".join(words), "label": "ab"[at % 2], "ner_tags": tags}
            for at, (words, tags) in enumerate(SENTENCES)
        ],
        # as many zeros and ones in every row
        rows_of(text=["one two three", "four five six", "ten two four"], label=[[0, 1, 0], [1, 0, 0], [0, 1, 1]]),
    ],
)
def test_labels_of_texts_are_none(rows):
    read(DataPart(source="memory"), rows=rows)


def test_what_has_no_labels_at_all_is_told_so():
    with pytest.raises(DataError, match="no label column found"):
        read(
            DataPart(source="memory"),
            rows=rows_of(text=["a film a day", "so bad so bad"], text_clean=["A b C d", "x y x y"]),
        )
