"""A run folder that is removed or renamed under its run ends the run, and what the run still had is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import RunFolderError
from paceline.run import run
from paceline.run.checkpoint.store import CheckpointStore
from paceline.run.loop import Loop
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import STEPS, recipe


def _at_step(monkeypatch: pytest.MonkeyPatch, number: int, work: Any) -> None:
    step = Loop._step

    def stepped(loop: Loop) -> None:
        step(loop)
        if loop.progress.step == number:
            work()

    monkeypatch.setattr(Loop, "_step", stepped)


def test_a_folder_that_is_emptied_is_as_good_as_gone(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rm -r, too, leaves the folder itself where the run writes into it meanwhile."""
    path = tmp_path / "run"

    def emptied() -> None:
        for found in path.iterdir():
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    with monkeypatch.context() as during:
        _at_step(during, 7, emptied)
        with pytest.raises(RunFolderError, match="was emptied while a run was in it") as error:
            train(recipe(pretrained, reviews), out=path)
    assert "a checkpoint of step 7 is saved in it" in error.value.why
    assert resume(path).status == "finished"


def test_a_recipe_that_is_gone_is_written_again_with_the_model(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    _at_step(monkeypatch, 7, (path / "recipe.yaml").unlink)
    assert train(recipe(pretrained, reviews), out=path).status == "finished"
    assert (path / "recipe.yaml").exists()


@pytest.mark.parametrize("how", ["renamed", "removed"])
@pytest.mark.parametrize("settings", [{}, {"evaluate_every": 7, "checkpoint_every": 7}], ids=["between", "at a save"])
def test_the_last_step_is_saved_and_gone_on_from(
    how: str, settings: Any, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    chosen = recipe(pretrained, reviews, loop=settings)
    with monkeypatch.context() as during:
        _at_step(during, 7, lambda: path.rename(moved) if how == "renamed" else shutil.rmtree(path))
        with pytest.raises(RunFolderError, match="removed or renamed while a run was in it") as error:
            train(chosen, out=path)
    place = moved if how == "renamed" else path
    assert error.value.exit_code == 2
    assert "a checkpoint of step 7 is saved in it" in error.value.why
    assert f"paceline train {place} --resume" in error.value.fix
    left = sorted(path.rglob("*")) if path.exists() else None
    assert (left is not None) == (how == "removed"), f"left under the old name: {left}"
    assert CheckpointStore(place / "checkpoints", 1).newest().step == 7
    record = resume(place)
    assert (record.status, record.steps) == ("finished", STEPS)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_bytes().splitlines()]
    found = [line["step"] for line in lines if line["kind"] == "step"]
    assert found == list(range(1 if how == "renamed" else 8, STEPS + 1))


def test_what_has_taken_the_place_of_a_run_is_left_as_it_is(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def replaced() -> None:
        shutil.rmtree(path)
        path.mkdir()
        (path / "mine").write_text("mine")

    _at_step(monkeypatch, 7, replaced)
    with pytest.raises(RunFolderError, match="nothing can be saved in its place"):
        train(recipe(pretrained, reviews), out=path)
    assert [found.name for found in path.iterdir()] == ["mine"]


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_trained_model_is_saved_though_the_folder_is_gone(
    how: str, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved, measure = tmp_path / "run", tmp_path / "moved", run.measure

    def measured(*arguments: Any) -> Any:
        found = measure(*arguments)
        path.rename(moved) if how == "renamed" else shutil.rmtree(path)
        return found

    monkeypatch.setattr(run, "measure", measured)
    with pytest.raises(RunFolderError, match="the trained model is saved in it"):
        train(recipe(pretrained, reviews), out=path)
    place = moved if how == "renamed" else path
    assert (place / "model" / "model.safetensors").exists()
    assert (place / "recipe.yaml").exists()
    assert path.exists() == (how == "removed")
