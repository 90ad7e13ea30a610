"""The soak itself: what it compares with, and what it would not overlook."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.verbs.train import train
from tests.e2e.commands import reviews, write_csv
from tests.e2e.whole_runs import outcome, recipe
from tests.soak import kills as soak_module
from tests.soak.kills import MARK, Soak, _committed, _files, _phase, _record, _step
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def soak(tmp_path: Path) -> Soak:
    """One whose quiet run is over."""
    data = write_csv(tmp_path / "reviews.csv", reviews())
    model = write_tiny_model(tmp_path / "model", tiny_bert_config())
    train(recipe(model, data, name="soak", observe={"report": True}), out=tmp_path / "quiet")
    (tmp_path / "temporary").mkdir()
    made = Soak(tmp_path)
    made._undisturbed = outcome(_record(tmp_path / "quiet"))
    made._files = set(_files(tmp_path / "quiet"))
    return made


def test_what_is_left_or_other_is_seen(soak: Soak) -> None:
    folder = soak.place / "run-1"
    shutil.copytree(soak.place / "quiet", folder)
    soak._compare(folder)
    partial = folder / ".model.abcdefgh"
    partial.mkdir()
    (partial / "config.json").write_text("{}")
    with pytest.raises(AssertionError, match=r"left behind: \['.model.abcdefgh/config.json'\]"):
        soak._compare(folder)
    shutil.rmtree(partial)
    (soak.place / "temporary" / "left").write_text("x")
    with pytest.raises(AssertionError, match="left in the folder of temporary files"):
        soak._compare(folder)
    (soak.place / "temporary" / "left").unlink()
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError, match="the saved model differs"):
        soak._compare(folder)


def test_a_process_that_outlives_the_others_is_seen_and_ended(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "QUIET_SECONDS", 0.3)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(soak.place), "RANK": "3"}) as orphan:
        while not soak._victims(orphan):
            time.sleep(0.01)
        with pytest.raises(AssertionError, match="1 processes outlive a kill"):
            soak._until_quiet(time.monotonic())
        assert orphan.wait(10) == -signal.SIGKILL
    assert soak._until_quiet(time.monotonic()) < 0.3


def test_where_a_run_is_can_be_told(soak: Soak) -> None:
    folder = soak.place / "quiet"
    assert (_step(folder), _committed(folder)) == (12, 12)
    assert _phase(folder, 11) == "steps"
    assert _phase(folder, 12) == "start"
    (folder / "checkpoints" / ".step-00000013.partial-1").mkdir()
    assert _phase(folder, 11) == "save"
    assert (_step(soak.place), _committed(soak.place)) == (0, 0)
