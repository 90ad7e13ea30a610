"""Ranks that are started again after a failure go on where the run was; and how long ago a checkpoint may be."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import CheckpointError, RunFolderError
from paceline.run import loop
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import train
from tests.e2e.ranks import on_ranks
from tests.e2e.whole_runs import STEPS, Crashed, Disturb, assert_same, lines, outcome, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("forked_interpreters")


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


@pytest.fixture
def crashed(pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of torchrun's job 7 that has crashed in its sixth step, as its second start finds it."""

    def crash(**changes: Any) -> Any:
        chosen = recipe(pretrained, reviews, **changes)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
        disturb.crash_at = 6
        with pytest.raises(Crashed):
            train(chosen, out=tmp_path / "run")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        return chosen

    return crash


def first_steps(folder: Path) -> list[int]:
    return [start["first_step"] for start in json.loads((folder / "manifest.json").read_text())["starts"]]


def test_the_second_start_goes_on_from_the_checkpoint(
    crashed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = crashed(loop={"checkpoint_every": 2})
    found = outcome(train(chosen, out=tmp_path / "run"))
    assert first_steps(tmp_path / "run") == [0, 5], "the end of an epoch is saved too"
    assert f"{tmp_path / 'run'}: started again, and goes on after step 5\n" in capsys.readouterr().err
    assert_same(found, outcome(train(chosen, out=tmp_path / "undisturbed")))


def test_without_a_checkpoint_it_begins_anew(crashed: Any, tmp_path: Path) -> None:
    chosen = crashed(loop={"checkpoint_every": "never", "save_best": False})
    assert len(lines(tmp_path / "run", "step")) > 0
    train(chosen, out=tmp_path / "run")
    train(chosen, out=tmp_path / "undisturbed")
    kinds = "step", "evaluation"
    assert lines(tmp_path / "run", *kinds) == lines(tmp_path / "undisturbed", *kinds)
    assert first_steps(tmp_path / "run") == [0]


def test_a_run_that_has_ended_is_left_as_it_is(
    crashed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank may fail on its way out, when the first one has written everything."""
    chosen = crashed(loop={"checkpoint_every": 2})
    ended = train(chosen, out=tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").stat()
    again = train(chosen, out=tmp_path / "run")
    assert (again.final, again.steps) == (ended.final, STEPS)
    assert (tmp_path / "run" / "summary.json").stat() == before
    assert "the run is finished, and nothing is left to do" in capsys.readouterr().err


def test_a_run_that_is_not_its_own_is_refused(
    crashed: Any, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.csv"
    own.write_text(reviews.read_text())
    chosen = crashed(loop={"checkpoint_every": 2}, data={"source": str(own)})
    folder = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"not like this one:\n  optimizer.lr: 0.01 -> 0.02"):
        train(chosen.with_settings(["optimizer.lr=0.02"]), out=folder)
    own.write_text(own.read_text().replace("film 0:", "movie 0:"))
    with pytest.raises(CheckpointError, match="data \\(its content\\)"):
        train(chosen, out=folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    with pytest.raises(RunFolderError, match="already holds a run"):
        train(chosen, out=folder)
    assert CheckpointStore(folder / "checkpoints", 1).steps() == (5,)


# ---- checkpoints by the clock


def test_a_checkpoint_after_so_many_minutes(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a minute by this clock; at every fourth look the last checkpoint is three or more minutes old."""
    minutes = iter(range(10**6))
    monkeypatch.setattr(loop.time, "monotonic", lambda: 60.0 * next(minutes))
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": "never", "save_best": False})
    train(chosen.with_settings(["loop.checkpoint_minutes=3"]), out=tmp_path / "run")
    saved = [line["step"] for line in lines(tmp_path / "run", "checkpoint")]
    assert saved == [3, 6, 9, 12]
    monkeypatch.undo()
    train(chosen, out=tmp_path / "undisturbed")
    kinds = "step", "evaluation"
    assert lines(tmp_path / "run", *kinds) == lines(tmp_path / "undisturbed", *kinds)


def test_all_ranks_save_when_the_first_ones_clock_says_so(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    """A rank that decided by its own would wait for the others in what they share before a save."""
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": "never", "checkpoint_minutes": 1e-5})
    ended = on_ranks(2, f"file://{tmp_path}/meeting", chosen, tmp_path / "run")
    assert [rank.error for rank in ended] == [None, None]
    assert len(lines(tmp_path / "run", "checkpoint")) >= STEPS


# ---- torchrun


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_torchrun_starts_a_lost_rank_again(number: signal.Signals, reviews: Path, steady: Path, tmp_path: Path) -> None:
    """Within its deadline, from the last checkpoint, and to the bits of the undisturbed run."""
    import time

    import yaml

    from tests.e2e.test_processes import SLOW_LOSS, steps, when
    from tests.e2e.test_ranks_processes import PACELINE, rank_ids, started

    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    chosen = recipe(
        steady, reviews, loop={"checkpoint_every": 1}, observe={"console": "plain"}, task={"loss": "slow_loss:loss"}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    agent = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*PACELINE, "recipe.yaml", "--timeout", "5"]
    with started(tmp_path, *agent, *words, "--out", "undisturbed") as undisturbed:
        _, errors = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, errors
    folder = tmp_path / "run"
    with started(tmp_path, *agent, "--max-restarts", "1", *words, "--out", "run") as process:
        when(process, lambda: steps(folder) >= 4)
        made, began = steps(folder), time.monotonic()
        os.kill(rank_ids(process.pid)[1], number)
        when(process, lambda: len(first_steps(folder)) == 2 if (folder / "manifest.json").exists() else False)
        restarted_after = time.monotonic() - began
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    # 5 s until it is missed, torchrun's 30 s from SIGTERM to SIGKILL, and a start
    assert restarted_after < (60 if number is signal.SIGSTOP else 40), f"{restarted_after:.0f} s"
    assert first_steps(folder)[1] >= made - 2, "more than the steps since the last checkpoint were lost"
    if number is signal.SIGSTOP:
        assert "rank 1 of 2 has not reached" in errors
    for name in ("model/model.safetensors", "checkpoints"):
        assert (folder / name).exists()
    kinds = "step", "evaluation"
    assert lines(folder, *kinds) == lines(tmp_path / "undisturbed", *kinds)
    model = "model/model.safetensors"
    assert (folder / model).read_bytes() == (tmp_path / "undisturbed" / model).read_bytes()
