"""When windows open and close: the recorder driven by hand, beside an engine and a listener that only take note."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch

from paceline.contract.errors import DiskFullError, RunFolderError
from paceline.contract.records import Notice
from paceline.contract.stopwatch import Stopwatch
from paceline.data.order import OrderState, ShuffledOrder
from paceline.recipe.windows import step_windows
from paceline.seams import Alone
from paceline.tracing.listeners import Listener
from paceline.tracing.recorder import StepMeta, WindowRecorder

PER_EPOCH = 10


class Engine:
    """Says when its steps are eager."""

    def __init__(self, diary: list[str], *, replays: bool) -> None:
        self.diary, self.replays = diary, replays

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        self.diary.append("eager")
        try:
            yield
        except BaseException:
            self.diary.append("failed")
            raise
        self.diary.append("replaying")


@final
class Noting(Listener):
    kind = "kineto"
    remark = ""

    def __init__(self, diary: list[str]) -> None:
        self.diary, self.full = diary, False

    def prepare(self) -> None:
        self.diary.append("prepare")

    def start(self) -> None:
        self.diary.append("start")

    def stop(self) -> None:
        self.diary.append("stop")

    def discard(self) -> None:
        self.diary.append("discard")

    def save(self, stem: Path) -> None:
        if self.full:
            raise DiskFullError("no room for a trace", "5 bytes free")
        self.diary.append(f"save {stem.parent.name}")


class Run:
    """A run of ``total`` steps with a recorder, and what happened in it."""

    def __init__(self, folder: Path, *asked: str, total: int = 30, first: int = 0, **options: Any) -> None:
        self.diary: list[str] = []
        self.told: list[Notice] = []
        self.at = first
        self.order = ShuffledOrder(np.arange(40), micro_batch_size=4, shuffle=False, drop_last=False, lengths=None)
        self.listener = Noting(self.diary)
        self.recorder = WindowRecorder(
            step_windows(asked, total, PER_EPOCH),
            first_step=first,
            folder=folder,
            listener=self.listener,
            world=Alone(),
            device=torch.device("cpu"),
            engine=Engine(self.diary, replays=options.get("replays", False)),  # type: ignore[arg-type]
            keeps_graphs=options.get("keep", False),
            measure=lambda step, epoch, ids: StepMeta(
                step=step, epoch=epoch, samples=sum(map(len, ids)), tokens=0, slots=0, flops=None
            ),
            about=lambda: {"device": "cpu"},
            tell=self.told.append,
            watch=Stopwatch(),
        )

    def until(self, last: int) -> list[str]:
        """Make steps; returns what happened, steps included."""
        for step in range(self.at + 1, last + 1):
            epoch, at = divmod(step - 1, PER_EPOCH)
            self.recorder.before_step(step)
            self.diary.append(str(step))
            at_bound = OrderState(seed=0, epoch=epoch, step=at, batch_size=4)
            self.recorder.after_step(step, epoch, self.order.plan(at_bound).microbatches)
        self.at = last
        return self.diary

    @property
    def messages(self) -> list[str]:
        return [notice.message for notice in self.told]


def windows(folder: Path) -> dict[str, dict[str, Any]]:
    found = sorted((folder / "trace").glob("*/rank0.window.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def test_a_window_opens_and_closes_at_step_bounds(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:6")
    assert run.until(8) == [
        *("1", "2", "3", "eager", "prepare", "4"),  # a step ahead: it is unlike others
        *("start", "5", "6", "stop", "replaying", "save steps-5-6", "7", "8"),
    ]
    (meta,) = windows(tmp_path).values()
    assert (meta["first_step"], meta["last_step"], meta["graphs"], meta["rank"]) == (5, 6, "none", 0)
    assert [(step["step"], step["epoch"], step["samples"]) for step in meta["steps"]] == [(5, 0, 4), (6, 0, 4)]
    assert run.recorder.written == [tmp_path / "trace" / "steps-5-6"]


def test_the_first_step_can_be_traced(tmp_path: Path) -> None:
    run = Run(tmp_path, "0:1")
    assert run.until(2) == ["eager", "prepare", "start", "1", "stop", "replaying", "save steps-1-1", "2"]
    assert windows(tmp_path)["steps-1-1"]["step_seconds_before"] is None
    assert run.messages[-1].startswith("traced step 1 into trace/steps-1-1: "), run.messages


def test_windows_that_touch(tmp_path: Path) -> None:
    run = Run(tmp_path, "2:4", "4:5")
    assert run.until(5)[3:] == [
        *("2", "start", "3", "4", "stop", "replaying", "save steps-3-4"),
        *("eager", "prepare", "start", "5", "stop", "replaying", "save steps-5-5"),
    ]


@pytest.mark.parametrize(("replays", "keep", "graphs"), [(True, False, "launched"), (True, True, "replayed")])
def test_what_becomes_of_captured_steps(tmp_path: Path, replays: bool, keep: bool, graphs: str) -> None:
    run = Run(tmp_path, "20:22", replays=replays, keep=keep)
    run.until(22)
    assert ("eager" in run.diary) is not keep
    meta = windows(tmp_path)["steps-21-22"]
    assert meta["graphs"] == graphs
    assert meta["step_seconds_before"] > 0
    assert ("are eager, where they are replayed" in run.messages[-1]) is not keep
    assert " ms before it" in run.messages[-1]


@pytest.mark.parametrize("first", [6, 8])
def test_resumed_into_the_middle_of_a_window(tmp_path: Path, first: int) -> None:
    run = Run(tmp_path, "1:3", "6:9", first=first)
    run.recorder.announce()
    run.until(12)
    assert list(windows(tmp_path)) == [f"steps-{first + 1}-9"]
    assert "1:3: steps 2 to 3 were made before" in run.messages[0]
    # at its first bound nothing of it is lost yet
    began = [message for message in run.messages if "began before this start" in message]
    assert len(began) == (first > 6), run.messages


def test_a_run_that_ends_in_a_window_keeps_its_whole_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:8", "20:22")
    run.until(6)
    run.recorder.finish(6, "the run stopped early")
    assert run.diary[-3:] == ["stop", "replaying", "save steps-5-6"]
    warnings = [notice.message for notice in run.told if notice.level == "warning"]
    assert warnings == [
        "trace.steps = 4:8: the run stopped early after step 6, before the window's end",
        "trace.steps = 20:22: never opened, the run stopped early after step 6",
    ]
    assert run.until(25)[-1] == "25"
    assert list(windows(tmp_path)) == ["steps-5-6"]


def test_a_failure_in_a_window_stops_listening_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:8")
    run.until(6)
    run.recorder.close()
    run.recorder.close()
    # the engine asks the other ranks nothing: they may not be here
    assert run.diary[-3:] == ["failed", "stop", "discard"]
    assert run.diary.count("stop") == 1
    assert windows(tmp_path) == {}


def test_a_failure_just_before_a_window(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:8")
    run.until(4)
    run.recorder.close()
    assert run.diary[-5:] == ["4", "failed", "start", "stop", "discard"], "torch's profiler would stay half begun"


def test_a_run_that_ends_just_before_a_window(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:8")
    run.until(4)
    run.recorder.finish(4, "the run was stopped")
    assert run.diary[-5:] == ["4", "start", "stop", "discard", "replaying"]
    assert run.messages == ["trace.steps = 4:8: never opened, the run was stopped after step 4"]
    assert not (tmp_path / "trace").exists()


def test_an_earlier_starts_files_are_replaced(tmp_path: Path) -> None:
    old = tmp_path / "trace" / "steps-5-6" / "rank3.window.json"
    old.parent.mkdir(parents=True)
    old.touch()
    Run(tmp_path, "4:6").until(6)
    assert sorted(path.name for path in old.parent.iterdir()) == ["rank0.window.json"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace").touch()
    with pytest.raises(RunFolderError, match="is no folder"):
        Run(tmp_path, "4:6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]


def test_where_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(RunFolderError, match="cannot be written"):
        Run(tmp_path, "4:6")


def test_a_long_window_is_warned_of(tmp_path: Path) -> None:
    run = Run(tmp_path, "0:1000", total=1000)
    run.recorder.announce()
    (warning,) = [notice.message for notice in run.told if notice.level == "warning"]
    assert warning == "trace.steps = 0:1000: 1,000 steps make a large trace; 990:1000 shows as much"


def test_nobody_listens_to_the_checkpoint_of_a_run_that_stops(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:8")
    run.until(6)
    run.recorder.stop()
    run.diary.append("checkpoint")
    run.recorder.finish(6, "the run was stopped")
    assert run.diary[-4:] == ["stop", "replaying", "checkpoint", "save steps-5-6"]
    assert run.diary.count("stop") == 1


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "4:6", "8:9")
    run.listener.full = True
    run.until(7)
    assert "discard" in run.diary
    warning = run.told[-1]
    assert warning.level == "warning"
    assert warning.message.startswith("the trace of steps 5 to 6 is lost: no room for a trace")
    run.listener.full = False
    run.until(9)
    assert list(windows(tmp_path)) == ["steps-9-9"]
