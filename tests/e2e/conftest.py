"""What whole runs are made of: sixty short reviews and a model so small that a run takes less than a second."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.data.order import OrderState
from paceline.prepare.course import Course
from tests.e2e.commands import Paceline, in_process
from tests.e2e.whole_runs import Disturb, Steps
from tests.testing.tiny import tiny_bert_config, write_tiny_model

ROWS = 60


def rows() -> list[dict[str, str]]:
    """Two classes that a few words tell apart; from 4 to 40 words a text."""
    words = {"good": ("wonderful", "laughed", "fine", "music"), "bad": ("dull", "worst", "nothing", "jokes")}
    filler = ["the", "evening", "at", "cinema", "was", "long", "and", "actors", "film", "sound", "of", "it", "that"]
    made = []
    for index in range(ROWS):
        label = ("good", "bad")[index % 2]
        length = 4 + index * 7 % 37
        text = [
            words[label][(index + at) % 4] if at % 5 == 2 else filler[(index * 3 + at) % 13] for at in range(length)
        ]
        made.append({"text": " ".join([f"film {index}:", *text]), "label": label})
    return made


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """reviews.csv: columns text and label, row i on line i + 2."""
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows())
    return path


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the Hub holds them: a BERT of two layers with dropout, and its tokenizer."""
    settings = tiny_bert_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", settings)


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    """The command, run in this process and in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    return in_process(monkeypatch, capsys)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Every step planned in this test, in order: epoch, step of the epoch, samples."""
    seen: Steps = []
    given = Course.input

    def noted(self: Course, at: OrderState, step: int) -> Any:
        seen.append((at.epoch, at.step, tuple(self.plan(at).samples.tolist())))
        return given(self, at, step)

    monkeypatch.setattr(Course, "input", noted)
    return seen


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturb]:
    """Signals and crashes at chosen steps; fails the test in which one of them did not come."""
    made = Disturb(monkeypatch)
    yield made
    assert not made.signals, "a signal was never sent"
    assert made.crash_at is None, "the crash never came"
