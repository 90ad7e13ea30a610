"""One run a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import DataError, RunFolderError
from paceline.engine.step import Step
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import assert_same, outcome, recipe


def test_a_second_run_is_refused_and_the_first_unharmed(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a new and a resumed one, while the first is in the middle of a step."""
    folder, micro, refusals = tmp_path / "run", Step.micro, []

    def intruded(*arguments: Any) -> Any:
        if len(refusals) < 2:
            with pytest.raises(RunFolderError) as refused:
                resume(folder) if refusals else train(recipe(pretrained, reviews, seed=9), out=folder)
            refusals.append(refused.value)
        return micro(*arguments)

    monkeypatch.setattr(Step, "micro", intruded)
    record = train(recipe(pretrained, reviews), out=folder)
    assert [refusal.exit_code for refusal in refusals] == [2, 2]
    assert all(f"process {os.getpid()}" in str(refusal) and "in use" in str(refusal) for refusal in refusals)
    assert_same(outcome(record), outcome(train(recipe(pretrained, reviews), out=tmp_path / "alone")))


def test_a_finished_run_is_not_overwritten(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = outcome(train(recipe(pretrained, reviews), out=folder))
    with pytest.raises(RunFolderError, match="already holds a run") as refused:
        train(recipe(pretrained, reviews, seed=9), out=folder)
    assert refused.value.exit_code == 2
    assert (folder / "model" / "model.safetensors").read_bytes() == whole.model


def test_a_folder_whose_run_failed_on_its_data_is_free(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    data, folder = tmp_path / "own.csv", tmp_path / "run"
    data.write_text(reviews.read_text() + "one,two,three\n")
    with pytest.raises(DataError, match=r"own\.csv:62"):
        train(recipe(pretrained, data), out=folder)
    data.write_bytes(reviews.read_bytes())
    assert train(recipe(pretrained, data), out=folder).status == "finished"
