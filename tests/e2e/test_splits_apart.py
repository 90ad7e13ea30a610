"""Every figure of a split is of that split: here validation is labelled the other way round, at equal sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.e2e.commands import write_csv
from tests.testing.tiny import tiny_bert_config

SIZES = {"train": 64, "validation": 16, "test": 16}
RECIPE: dict[str, Any] = {
    "model": {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300},
    "data": {"source": "data.csv", "split": "split"},
    "loop": {"epochs": 4, "batch_size": 8, "save_best": False},
    "optimizer": {"lr": 3e-3},
    "observe": {"console": "off", "report": False, "baseline": "tfidf"},
    "device": "cpu",
}


def labelled(split: str) -> list[dict[str, str]]:
    """Return rows of a split; as many of each label, by the same words, which mean the contrary in validation."""
    draw, made = random.Random(split), []
    for number in range(SIZES[split]):
        is_good = number % 2 == 0
        words = ["fine", "good", "nice"] if is_good else ["bad", "dull", "poor"]
        text = " ".join(draw.choices(words, k=4))
        label = "good" if is_good == (split != "validation") else "bad"
        made.append({"text": f"{text} {split} {number}", "label": label, "split": split})
    return made


@pytest.mark.parametrize("changes", [{}, {"optimizer": {"lr": 3e-3, "ema": 0.5}}], ids=["weights", "average"])
def test_figures_are_of_their_own_split(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(Path("data.csv"), [row for split in SIZES for row in labelled(split)])
    record = paceline.train({**RECIPE, **changes}, out="run")
    right = {"validation": 0.0, "test": 1.0}
    assert {split: scores["accuracy"] for split, scores in record.final.items()} == right
    assert record.final["validation"]["loss"] > 1.0 > record.final["test"]["loss"]
    assert {split: scores["accuracy"] for split, scores in record.baseline.items()} == right
    assert [found.split for found in record.evaluations] == ["validation"] * 4
    assert record.evaluations[-1].metrics["accuracy"] == 0.0
    assert record.evaluations[-1].train_metrics["accuracy"] > 0.9
    compared = [notice for notice in record.notices if "no better" in notice]
    assert [notice.split(" of ")[0] for notice in compared] == ["test accuracy 1.0000 is no better than 1.0000"]
    for split in right:
        predicted = paceline.predict("run", [row["text"] for row in labelled(split)])
        hits = [one["prediction"] == row["label"] for one, row in zip(predicted, labelled(split), strict=True)]
        assert sum(hits) / len(hits) == right[split]
        assert paceline.evaluate("run", split=split).metrics["accuracy"] == right[split]
