"""A clock that is set back or ahead while a run works changes neither its result nor whether it can go on."""

from __future__ import annotations

import datetime
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import Preempted
from paceline.run_folder import origin, ways
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import Disturb, assert_same, outcome, recipe

YEAR = 365 * 86400


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day is another year's at each look: 1971, 2100, today, and again."""
    true = time.time
    jumps = itertools.cycle([YEAR - true(), 75.0 * YEAR, 0.0])

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(true() + next(jumps), tz)

    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int((true() + next(jumps)) * 1e9))
    for module in (origin, ways):
        monkeypatch.setattr(module, "datetime", Jumping)


@pytest.mark.usefixtures("jumping")
def test_a_clock_that_jumps_changes_no_bit(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 2}, observe={"console": "plain", "report": True})
    whole = outcome(train(chosen, out="undisturbed"))
    disturb.signals[7] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out="run")
    record = resume("run")
    assert_same(outcome(record), whole)
    assert all(seconds >= 0 for seconds in record.seconds.values()), record.seconds
    assert record.seconds["total"] < 600, "a jump of years was counted"
    assert record.samples_per_second > 0
    times = [start["time"] for start in json.loads(Path("run/manifest.json").read_text())["starts"]]
    assert times[0][:4] != times[1][:4], "the clock did not jump: this test saw nothing"


@pytest.mark.usefixtures("jumping")
def test_two_runs_of_one_second_long_ago_have_folders_of_their_own(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = recipe(pretrained, reviews, loop={"max_steps": 1, "evaluate_every": "never"}, schedule={"warmup": 0})
    folders = {train(chosen).folder for _ in range(4)}
    assert len(folders) == 4
