"""Rows that tell of the training samples."""

from __future__ import annotations

from dataclasses import replace

from paceline.contract.records import Cut, DataRecord, TextLengths
from paceline.observe.data_facts import data_facts, sparkline

LENGTHS = TextLengths(
    max_length=64,
    median=230,
    p95=600,
    longest=2470,
    histogram=(1, 8, 4, 0),
    histogram_end=900,
    cut=Cut(max_length=64, texts=0.975, tokens=0.81),
    others=(Cut(max_length=256, texts=0.4, tokens=0.3), Cut(max_length=2470, texts=0.0, tokens=0.0)),
)


def test_what_is_cut_is_told() -> None:
    rows = dict(data_facts(DataRecord(labels={"no": 3000, "y\x1bes": 12}, lengths=LENGTHS)))
    assert rows["labels"] == "no 3,000, y\\x1bes 12"
    assert rows["tokens"] == "median 230, 95% of texts up to 600, longest 2,470  0 ▂█▅  900"
    assert rows["cut"] == (
        "97.5% of texts, 81.0% of all tokens, at data.max_length = 64, data.overflow = head"
        " (256: 40.0% and 30.0%; 2,470: nothing)"
    )


def test_the_size_of_the_vocabulary_stands_beside_what_the_model_takes() -> None:
    known = DataRecord(labels={}, lengths=LENGTHS, vocabulary_size=30_522, max_positions=512)
    assert dict(data_facts(known))["vocabulary"] == "30,522 tokens; the model takes 512 of a text"
    assert dict(data_facts(replace(known, max_positions=None)))["vocabulary"] == "30,522 tokens"
    assert "vocabulary" not in dict(data_facts(DataRecord(labels={}, lengths=LENGTHS))), "an older run tells nothing"


def test_windows_cut_nothing_and_are_told() -> None:
    rows = dict(data_facts(DataRecord(labels={}, lengths=replace(LENGTHS, overflow="windows", windows=39))))
    assert rows["cut"] == "nothing: 97.5% of texts have windows, up to 39, at data.max_length = 64"
    bounded = replace(LENGTHS, overflow="windows", windows=3, max_windows=3)
    told = dict(data_facts(DataRecord(labels={}, lengths=bounded)))["cut"]
    assert told.startswith("what is behind data.max_windows = 3: 97.5% of texts have windows")


def test_many_labels_are_counted() -> None:
    few = {f"l{n}": 9 - n for n in range(9)}
    assert dict(data_facts(DataRecord(labels=few, num_labels=1300, lengths=None)))["labels"].endswith(
        ", and 1,292 more"
    )
    rows = dict(data_facts(DataRecord(labels=few, lengths=None)))
    assert rows == {"labels": "l0 9, l1 8, l2 7, l3 6, l4 5, l5 4, l6 3, l7 2, and 1 more"}


def test_a_sparkline_shows_what_there_is() -> None:
    assert sparkline([0, 1, 1000]) == " ▂█"
    assert sparkline([]) == sparkline([0])[1:] == ""
