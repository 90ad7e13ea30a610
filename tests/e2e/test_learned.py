"""A run that learned nothing says so, and what far simpler means score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline as library
from paceline.contract.errors import RecipeError
from tests.e2e.commands import reviews, write_csv
from tests.testing.tiny import tiny_bert_config


def recipe(data: Path, **parts: Any) -> library.Recipe:
    return library.Recipe.parse(
        {
            "model": {"config": tiny_bert_config(), "vocabulary_size": 300},
            "data": {"source": str(data)},
            "loop": {"epochs": 1, "batch_size": 16},
            "optimizer": {"lr": 1e-6},
            "observe": {"console": "plain", "baseline": "tfidf"},
            **parts,
        }
    )


def test_a_model_that_learned_nothing_is_told_from_words_that_suffice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = library.train(recipe(write_csv(tmp_path / "reviews.csv", reviews(200))), out=tmp_path / "run")
    assert found.baseline["test"]["accuracy"] == 1, "a word tells the classes of these reviews"
    assert found.final["test"]["accuracy"] < 1, "this run learns too much for the test"
    chance = [notice for notice in found.notices if "always guessing" in notice]
    words = [notice for notice in found.notices if "TF-IDF and logistic regression" in notice]
    assert (len(chance), len(words)) == (1, 1), found.notices
    shown = capsys.readouterr().out
    assert f"warning: {chance[0]}" in shown
    assert f"warning: {words[0]}" in shown
    assert "  baseline    validation: loss " in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["baseline"]["test"]["accuracy"] == 1
    assert chance[0] in summary["notices"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "test, baseline" in page
    assert "no better than" in page


def test_a_baseline_that_cannot_be_fitted_is_refused_at_the_start(tmp_path: Path) -> None:
    numbers = [{"text": row["text"], "label": f"{number}.5"} for number, row in enumerate(reviews(60))]
    with pytest.raises(RecipeError, match="it is for classes"):
        library.train(recipe(write_csv(tmp_path / "numbers.csv", numbers)), out=tmp_path / "run")


def test_data_that_are_gone_at_the_end_cost_the_baseline_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.run import ending

    data, measure = write_csv(tmp_path / "reviews.csv", reviews(60)), ending.measure_baseline

    def too_late(*arguments: Any) -> Any:
        data.unlink()
        return measure(*arguments)

    monkeypatch.setattr(ending, "measure_baseline", too_late)
    found = library.train(recipe(data), out=tmp_path / "run")
    assert found.status == "finished"
    assert found.baseline == {}
    assert any("observe.baseline = tfidf: not fitted:" in notice for notice in found.notices)
