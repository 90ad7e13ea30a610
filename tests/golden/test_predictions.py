"""Predicted memory is what is written down, and a comparison that could not fail would be seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import predictions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_part_of_the_predictions_is_as_written_down() -> None:
    """Of packed rows and of shards, a dozen; all of them take minutes and are for a refactoring's end."""
    command = [sys.executable, "-m", "tests.golden.predictions", "--check", "--only", "[fp]*"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode == predictions.NO_RECORD:
        pytest.skip(ended.stdout)
    assert ended.returncode == predictions.SAME, ended.stdout + ended.stderr


def case(**changes: object) -> predictions.Case:
    parts = {"activations": 70, "rounding": 30}
    return {"allocated": 100, "reserved": 120, "total": 150, "parts": parts, "moment": "backward", **changes}


def test_what_differs_is_told_in_bytes() -> None:
    recorded = {"one": case(), "other": case()}
    assert predictions.differences({"one": case()}, recorded) == []
    changed = case(allocated=101, parts={"activations": 71, "rounding": 28, "batch": 2}, moment="forward")
    assert predictions.differences({"one": case(), "other": changed, "third": case()}, recorded) == [
        "other: allocated 100 -> 101 (+1), moment backward -> forward, of which activations 70 -> 71 (+1), "
        "of which rounding 30 -> 28 (-2), of which batch None -> 2",
        "third: not recorded",
    ]
    assert predictions.differences({"one": {"problem": "too much"}}, recorded)[0].startswith(
        "one: allocated 100 -> None"
    )


def test_other_versions_have_no_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(predictions, "versions", lambda: "torch 0.4, transformers 0.1")
    monkeypatch.setattr(sys, "argv", ["predictions", "--check"])
    assert predictions.main() == predictions.NO_RECORD
    assert capsys.readouterr().out.startswith("no record for torch 0.4, transformers 0.1, only for torch ")


def test_a_part_that_is_made_anew_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.json")
    for options, made in (([], {"one": case(), "other": case()}), (["--only", "one"], {"one": case(total=151)})):
        monkeypatch.setattr(predictions, "predictions", lambda only, made=made: made)
        monkeypatch.setattr(sys, "argv", ["predictions", "--write", *options])
        assert predictions.main() == predictions.SAME
    assert predictions.read_records() == {predictions.versions(): {"one": case(total=151), "other": case()}}
