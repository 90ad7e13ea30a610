"""Runs that would fill the memory are refused before the first step, with what they would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.contract.errors import UserError
from paceline.data.dataset import Origins
from paceline.data.labels import encode_known_labels
from paceline.machine import facts
from tests.e2e.whole_runs import recipe


@pytest.mark.parametrize("loop", [{"epochs": 10**9, "max_steps": None}, {"epochs": 10**12, "max_steps": 10**12}])
def test_more_steps_than_can_be_planned(loop: dict[str, Any], pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps are planned") as error:
        paceline.train(recipe(pretrained, reviews, loop=loop), out=tmp_path / "run")
    assert "loop.max_steps=" in error.value.fix


def test_many_epochs_of_which_few_steps_are_made(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    loop = {"epochs": 10**12, "max_steps": 4}
    assert paceline.train(recipe(pretrained, reviews, loop=loop), out=tmp_path / "run").steps == 4


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"task": {"metrics": ["auroc"]}}, "task.metrics"),
        ({"task": {"threshold": "tuned"}}, "task.threshold=0.5"),
        ({"observe": {"baseline": "tfidf"}}, "leave it out"),
    ],
    ids=["auroc", "threshold", "baseline"],
)
def test_scores_that_do_not_fit(
    changes: dict[str, Any],
    fix: str,
    pretrained: Path,
    reviews: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of 100,000 classes: the machine is made small here, and not the data large."""
    monkeypatch.setattr(facts, "main_memory_bytes", lambda: 100)
    with pytest.raises(UserError, match="GiB of main memory") as error:
        paceline.train(recipe(pretrained, reviews, **changes), out=tmp_path / "run")
    assert fix in error.value.fix
    assert not list((tmp_path / "run").glob("checkpoints/step-*")), "steps were made"


def test_labels_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"label {number}" for number in range(1000)]
    nowhere = Origins(("a.csv",), np.zeros(3, np.int32), np.zeros(3, np.int64))
    labels = [(names[0],), (names[1], names[2]), ()]
    monkeypatch.setattr(facts, "main_memory_bytes", lambda: 4 * 3 * 1000)
    assert encode_known_labels(labels, "multi_label", names, nowhere).values.sum() == 3
    monkeypatch.setattr(facts, "main_memory_bytes", lambda: 4 * 3 * 1000 - 1)
    with pytest.raises(UserError, match="3 samples with 1,000 labels"):
        encode_known_labels(labels, "multi_label", names, nowhere)


def test_few_probabilities_are_held_of_many_classes(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.run import inference

    run = paceline.train(recipe(pretrained, reviews, loop={"max_steps": 4}), out=tmp_path / "run").folder
    texts = [f"a fine evening {number}" for number in range(7)]
    expected = paceline.predict(run, texts)
    windows = []
    prepare = inference.prepare_to_predict

    def note(part: Any, given: Any, size: int, **options: Any) -> Any:
        windows.append(size)
        return prepare(part, given, size, **options)

    monkeypatch.setattr(inference, "prepare_to_predict", note)
    monkeypatch.setattr(inference, "_MOST_SCORES", 6)
    labelled = paceline.predict(run, texts)
    assert windows == [3]
    assert [row["prediction"] for row in labelled] == [row["prediction"] for row in expected]
