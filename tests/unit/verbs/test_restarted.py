"""What a start does in a run folder that has a run: only that of its own job goes on by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.contract.errors import CheckpointError, RunFolderError
from paceline.machine.jobs import is_restart, job_of
from paceline.recipe import Recipe
from paceline.run_folder import RunFolder
from paceline.verbs.restarted import ended_run, way_of
from paceline.verbs.train import recipe_to_resume

RECIPE = Recipe.parse(
    {"name": "x", "model": {"source": "someone/model"}, "data": {"source": "a.csv"}, "device": "cpu", "seed": 3}
)
AGAIN = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that job 7 has begun, and that has made a step."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    path = tmp_path / "run"
    with RunFolder.create(path) as made:
        made.write_recipe(RECIPE)
        made.write_manifest(command=["paceline"], hardware={}, data_fingerprint="abc", seeds={"seed": 3})
    (path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    return path


def with_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "COMMITTED").touch()


def test_a_start_that_follows_a_failure(folder: Path) -> None:
    assert way_of(folder, AGAIN, ["paceline"]) == "anew"
    with_checkpoint(folder)
    assert way_of(folder, AGAIN, ["paceline"]) == "go on"
    (folder / "summary.json").write_text("{}")
    assert way_of(folder, AGAIN, ["paceline"]) == "done"


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"steps": 3}'])
def test_a_damaged_summary_of_a_run_that_has_ended_is_named(folder: Path, content: bytes) -> None:
    (folder / "summary.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"summary\.json: "):
        ended_run(folder)
    with pytest.raises(CheckpointError, match="the run is finished"):
        recipe_to_resume(folder)


@pytest.mark.parametrize(
    "variables",
    [{}, {**AGAIN, "TORCHELASTIC_RESTART_COUNT": "0"}, {**AGAIN, "TORCHELASTIC_RUN_ID": "8"}, {"SLURM_JOB_ID": "7"}],
    ids=["by hand", "the first start", "another job", "a scheduler's first start"],
)
def test_any_other_start_is_refused_as_ever(folder: Path, variables: dict[str, str]) -> None:
    with_checkpoint(folder)
    assert way_of(folder, variables, ["paceline"]) == "begin"


def test_another_command_takes_nothing_away(folder: Path) -> None:
    assert way_of(folder, AGAIN, ["paceline", "train", "other.yaml"]) == "begin"


def test_there_is_nothing_to_go_on_with(folder: Path, tmp_path: Path) -> None:
    assert way_of(None, AGAIN, ["paceline"]) == "begin"
    assert way_of(tmp_path / "nothing", AGAIN, ["paceline"]) == "begin"
    starts = json.loads((folder / "manifest.json").read_text())["starts"]
    assert starts[-1]["job"] == "torchrun 7"
    (folder / "manifest.json").unlink()
    assert way_of(folder, AGAIN, ["paceline"]) == "begin"


def test_jobs_by_their_variables() -> None:
    assert job_of({}) is None
    assert job_of({"SLURM_JOB_ID": "12"}) == "slurm 12"
    assert job_of({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "x"}) == "torchrun x"
    assert is_restart({"SLURM_RESTART_COUNT": "2"})
    assert not is_restart({"SLURM_RESTART_COUNT": "", "TORCHELASTIC_RESTART_COUNT": "0"})
