"""Whole runs give the bits written down, and a comparison that could not fail would be seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline import Recipe
from tests.golden import hashes
from tests.golden.rows import ROWS, Row, recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_runs_give_the_bits_written_down() -> None:
    """In a process of its own, whose torch is told at its start which instructions to use."""
    command = [sys.executable, "-m", "tests.golden.hashes", "--check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode == hashes.NO_RECORD:
        pytest.skip(ended.stdout)
    assert ended.returncode == hashes.SAME, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.own_loop])
def test_the_recipe_of_a_row_is_one(name: str, tmp_path: Path) -> None:
    Recipe.parse(recipe(ROWS[name], tmp_path))


def test_rows_are_compared_with_rows_that_are_there() -> None:
    assert {row.same_as for row in ROWS.values()} - {None} <= set(ROWS)


def found(**changes: object) -> hashes.Found:
    return {"weights": "1", "optimizer": "2", "metrics": "3", "path": {"layout": "packed"}, "last_loss": 0.5, **changes}


def test_what_differs_from_the_record_is_named() -> None:
    recorded = {"text": found(), "adam": found()}
    assert hashes.unlike_the_record({"text": found()}, recorded) == []
    assert hashes.unlike_the_record({"text": found(), "adam": found(optimizer="7")}, recorded) == [
        "adam: optimizer not as recorded; last loss 0.5"
    ]
    assert hashes.unlike_the_record({"text": found(weights="7", metrics="7", last_loss=0.6)}, recorded) == [
        "text: weights and metrics not as recorded; last loss 0.6, recorded 0.5"
    ]
    (line, path) = hashes.unlike_the_record({"text": found(path={"layout": "padded"})}, recorded)
    assert line == "text: path not as recorded; last loss 0.5"
    assert "'padded'" in path
    assert "'packed'" in path


def test_rows_that_have_to_agree_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "ROWS", {"whole": Row(), "resumed": Row(same_as="whole")})
    assert hashes.unlike_each_other({"whole": found(), "resumed": found(path={})}) == []
    assert hashes.unlike_each_other({"resumed": found(weights="7")}) == [], "the other row was not run"
    assert hashes.unlike_each_other({"whole": found(), "resumed": found(weights="7")}) == [
        "resumed: weights not as those of whole"
    ]


def test_a_machine_without_a_record_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hashes, "machine", lambda: "torch 2.13.0, abacus")
    monkeypatch.setattr(sys, "argv", ["hashes", "--check"])
    assert hashes.main() == hashes.NO_RECORD
    assert capsys.readouterr().out.startswith("no record for torch 2.13.0, abacus: ")


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"b": torch.ones(2), "a": torch.zeros(2)}, True),
        ({"a": torch.zeros(2), "b": torch.ones(2).nextafter(torch.zeros(2))}, False),
        ({"a": torch.zeros(2), "c": torch.ones(2)}, False),
        ({"a": torch.zeros(2), "b": torch.ones(2, 1)}, False),
        ({"a": torch.zeros(2, dtype=torch.int32), "b": torch.ones(2)}, False),
        ({"a": torch.zeros(2)}, False),
    ],
    ids=["in another order", "one bit", "a name", "a shape", "a dtype", "one less"],
)
def test_digests_of_tensors(changed: dict[str, torch.Tensor], same: bool, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file(changed, tmp_path / "other.safetensors", metadata={"of": "no account"})
    one, other = (hashes.digest_of_tensors(tmp_path / f"{name}.safetensors") for name in ("one", "other"))
    assert (one == other) is same


def test_a_record_keeps_rows_that_were_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hashes, "record_file", lambda: tmp_path / "record.json")
    monkeypatch.setattr(hashes, "ROWS", {"one": Row(), "other": Row()})
    assert hashes.read_record() is None
    hashes.write_record({"one": found(), "other": found()})
    hashes.write_record({"other": found(weights="7")})
    record = hashes.read_record()
    assert record is not None
    assert record["rows"] == {"one": found(), "other": found(weights="7")}
    assert record["environment"]["OMP_NUM_THREADS"] == "1"
