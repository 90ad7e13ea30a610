"""A checkpoint that cannot be written is told of at the bound of the step in which that was found."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import DiskFullError
from paceline.run.checkpoint import store
from paceline.run.checkpoint.background import BackgroundStore
from paceline.run.checkpoint.store import CheckpointStore
from paceline.run.loop import Loop
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import STEPS, recipe


@pytest.mark.parametrize("found_in", [7, 9])
def test_a_failed_save_ends_the_run_by_the_next_step(
    found_in: int, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 6 fails while step ``found_in`` is under way; the next one would be due after step 12."""
    room, step, may_fail, steps = store.require_room, Loop._step, threading.Event(), list[int]()

    def full(folder: Path, needed: int, what: str) -> None:
        if what == "a checkpoint of step 6":
            assert may_fail.wait(20)
            raise DiskFullError(f"{folder}: no room for {what}", f"{needed:,} bytes needed, 5 bytes free")
        room(folder, needed, what)

    def noted(loop: Loop) -> None:
        steps.append(loop.progress.step + 1)
        if steps[-1] == found_in:
            may_fail.set()
            saves = loop.job.store
            assert isinstance(saves, BackgroundStore)
            assert saves._in_flight is not None, "the run waited for the save, or forgot it"
            assert isinstance(saves._in_flight.exception(timeout=20), DiskFullError)
        step(loop)

    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 6, "evaluate_every": "never"})
    with monkeypatch.context() as during:
        during.setattr(store, "require_room", full)
        during.setattr(Loop, "_step", noted)
        with pytest.raises(DiskFullError, match="no room for a checkpoint of step 6") as error:
            train(chosen, out=tmp_path / "run")
    again = f"free some space there; no step of it is saved: remove {tmp_path / 'run'}"
    assert error.value.fix == again, "there is no checkpoint to go on from"
    assert steps[-1] == found_in, "it surfaced later than at the end of that step"
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).steps() == ()


def test_after_a_failed_save_the_one_before_it_is_gone_on_from(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = store.require_room

    def full(folder: Path, needed: int, what: str) -> Any:
        if what == "a checkpoint of step 8":
            raise DiskFullError(f"{folder}: no room for {what}", f"{needed:,} bytes needed, 5 bytes free")
        room(folder, needed, what)

    with monkeypatch.context() as during:
        during.setattr(store, "require_room", full)
        with pytest.raises(DiskFullError):
            train(recipe(pretrained, reviews, loop={"checkpoint_every": 4}), out=tmp_path / "run")
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest()
    assert newest.step in (4, 5), "5 is the end of the first epoch, whose evaluation was the best"
    assert resume(tmp_path / "run").steps == STEPS


def test_a_run_whose_report_finds_no_room_is_whole(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFullError("no room for a report", "9 bytes needed, 8 bytes free")

    monkeypatch.setattr("paceline.run.run.build_report", full)
    with pytest.raises(DiskFullError) as error:
        train(recipe(pretrained, reviews, observe={"console": "off", "report": True}), out=tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
    assert error.value.fix == f"free some space there; the run itself is whole: paceline report {tmp_path / 'run'}"
