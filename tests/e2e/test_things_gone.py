"""Folders that are read-only, or vanish under a run: what is not needed any more is not missed, all else is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.contract.errors import Preempted, UserError
from paceline.run.loop import Loop
from paceline.verbs.train import resume, train
from tests.e2e.commands import Paceline
from tests.e2e.whole_runs import Disturb, assert_same, outcome, recipe


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> None:
    step = Loop._step

    def stepped(loop: Loop) -> None:
        step(loop)
        if loop.progress.step == number:
            work()

    monkeypatch.setattr(Loop, "_step", stepped)


@pytest.fixture
def place(pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model, data and cache of the test's own."""
    shutil.copytree(pretrained, tmp_path / "model")
    shutil.copy(reviews, tmp_path / "reviews.csv")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_data_model_and_cache_are_not_missed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = recipe(place / "model", place / "reviews.csv", loop={"checkpoint_every": 2})
    whole = outcome(train(chosen, out=place / "undisturbed"))

    def gone() -> None:
        shutil.rmtree(place / "model")
        shutil.rmtree(place / "cache")
        (place / "reviews.csv").unlink()
        shutil.rmtree(place / "run" / "checkpoints")

    at_step(monkeypatch, 7, gone)
    assert_same(outcome(train(chosen, out=place / "run")), whole)


@pytest.mark.parametrize("name", ["model", "reviews.csv"])
def test_a_resume_names_what_is_gone_and_goes_on_once_it_is_back(name: str, place: Path, disturb: Disturb) -> None:
    chosen = recipe(place / "model", place / "reviews.csv")
    whole = outcome(train(chosen, out=place / "undisturbed"))
    disturb.signals[7] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out=place / "run")
    (place / name).rename(place / "aside")
    shutil.rmtree(place / "cache")
    before = sorted(path for path in (place / "run").rglob("*"))
    with pytest.raises(UserError, match=name):
        resume(place / "run")
    assert sorted(path for path in (place / "run").rglob("*")) == before, "what was refused has changed the folder"
    (place / "aside").rename(place / name)
    assert_same(outcome(resume(place / "run")), whole)


@pytest.fixture
def read_only(place: Path) -> Iterator[Path]:
    """A finished run on a file system that can only be read."""
    folder = place / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        train(recipe(place / "model", place / "reviews.csv", observe={"report": True}), out=folder / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder / "run"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_run_that_can_only_be_read_is_used_and_not_changed(read_only: Path, place: Path, paceline: Paceline) -> None:
    assert paceline("evaluate", read_only).code == 0
    assert paceline("predict", read_only, place / "reviews.csv", "-o", "labelled.csv").code == 0
    for arguments in (
        ("report", read_only),
        ("train", read_only, "--resume", "--set", "loop.max_steps=13"),
        ("train", read_only / "recipe.yaml", "--out", read_only.parent / "another"),
    ):
        done = paceline(*arguments)
        assert done.code == 2, done
        assert "written" in done.err, done.err
        assert "  fix: " in done.err, done.err
