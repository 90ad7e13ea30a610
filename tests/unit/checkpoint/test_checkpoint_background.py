"""Background saving: the run goes on with other weights, the disk gets the old ones, and no failure is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import DiskFullError
from paceline.contract.records import CheckpointRecord
from paceline.contract.stopwatch import Stopwatch
from paceline.run.checkpoint.background import BackgroundStore
from paceline.run.checkpoint.store import CheckpointStore


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((4, 3), value)}, "optimizer": {"w.moment": torch.full((5,), -value)}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BackgroundStore]:
    made = BackgroundStore(CheckpointStore(tmp_path / "checkpoints", keep_last=2))
    yield made
    made.close()


@pytest.fixture
def gate(store: BackgroundStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until the gate is set, as on a slow disk."""
    opened = threading.Event()
    write = store.store.save

    def slow(*arguments: Any, **named: Any) -> CheckpointRecord:
        assert opened.wait(10), "the gate was never opened"
        return write(*arguments, **named)

    monkeypatch.setattr(store.store, "save", slow)
    yield opened
    opened.set()


def failing(store: BackgroundStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **named: Any) -> CheckpointRecord:
        raise DiskFullError("no room", "9 bytes needed, 8 bytes free", "free some")

    monkeypatch.setattr(store.store, "save", full)


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(store: BackgroundStore, gate: threading.Event) -> None:
    live, state = tensors(1.0), {"seen": [1]}
    store.save(1, live, state)
    live["model"]["w"].fill_(7)
    live["optimizer"]["w.moment"].fill_(7)
    state["seen"].append(2)
    assert store.committed() == [], "told of before it was written"
    assert store.store.steps() == ()
    gate.set()
    store.wait()
    assert [record.step for record in store.committed()] == [1]
    assert store.committed() == [], "told of twice"
    found = store.store.newest()
    assert torch.equal(found.tensors("model")["w"], torch.full((4, 3), 1.0))
    assert torch.equal(found.tensors("optimizer")["w.moment"], torch.full((5,), -1.0))
    assert found.state == {"seen": [1]}


def test_a_second_save_waits_for_the_first(store: BackgroundStore, gate: threading.Event) -> None:
    store.save(1, tensors(1.0), {})
    threading.Timer(0.1, gate.set).start()
    store.save(2, tensors(2.0), {}, is_best=True)
    assert 1 in store.store.steps(), "the second save began before the first was committed"
    best = store.best()
    assert best is not None
    assert best.step == 2, "best() did not wait"
    assert [(record.step, record.is_best) for record in store.committed()] == [(1, False), (2, True)]


def test_older_ones_are_dropped_in_order_and_the_best_stays(store: BackgroundStore) -> None:
    for step in range(1, 7):
        store.save(step, tensors(float(step)), {}, is_best=step == 2)
    store.wait()
    assert store.store.steps() == (2, 5, 6)
    assert [record.step for record in store.committed()] == [1, 2, 3, 4, 5, 6]


def test_memory_is_taken_once(store: BackgroundStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    write = store.store.save

    def noting(step: int, kept: Any, *rest: Any, **named: Any) -> CheckpointRecord:
        seen.append(kept["model"]["w"].data_ptr())
        return write(step, kept, *rest, **named)

    monkeypatch.setattr(store.store, "save", noting)
    for step in (1, 2, 3):
        store.save(step, tensors(float(step)), {})
    store.wait()
    assert len(set(seen)) == 1, "each save takes memory of its own"


@pytest.mark.parametrize("ask", [BackgroundStore.wait, BackgroundStore.committed, BackgroundStore.best])
def test_a_full_disk_is_told_of_once_by_the_next_call(
    store: BackgroundStore, monkeypatch: pytest.MonkeyPatch, ask: Callable[[BackgroundStore], object]
) -> None:
    with monkeypatch.context() as context:
        failing(store, context)
        store.save(1, tensors(1.0), {})
        while store._in_flight is not None and not store._in_flight.done():
            threading.Event().wait(0.001)
        with pytest.raises(DiskFullError, match="no room"):
            ask(store)
        assert store.committed() == []
    store.save(2, tensors(2.0), {})
    store.wait()
    assert [record.step for record in store.committed()] == [2], "after a failure nothing can be saved any more"


def test_a_save_after_a_failed_one_raises_and_saves_nothing(
    store: BackgroundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        failing(store, context)
        store.save(1, tensors(1.0), {})
        with pytest.raises(DiskFullError):
            store.save(2, tensors(2.0), {})
    store.wait()
    assert store.store.steps() == ()


def test_closing_sees_a_save_through(tmp_path: Path) -> None:
    store = BackgroundStore(CheckpointStore(tmp_path, keep_last=1))
    store.save(3, tensors(3.0), {})
    store.close()
    assert store.store.steps() == (3,)


def test_closing_warns_of_a_failure_nobody_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BackgroundStore(CheckpointStore(tmp_path, keep_last=1))
    failing(store, monkeypatch)
    store.save(3, tensors(3.0), {})
    with pytest.warns(UserWarning, match="the last checkpoint was not saved: no room"):
        store.close()


def test_the_writing_is_counted_beside_the_run(tmp_path: Path) -> None:
    watch = Stopwatch()
    store = BackgroundStore(CheckpointStore(tmp_path, keep_last=1), watch)
    store.save(3, tensors(3.0), {})
    store.close()
    assert watch.overlapped()["checkpoint"] > 0
    assert "checkpoint" not in watch.seconds()


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import torch
from paceline.run.checkpoint import store as module
from paceline.run.checkpoint.background import BackgroundStore
from paceline.run.checkpoint.store import CheckpointStore

store = BackgroundStore(CheckpointStore(Path(sys.argv[1]), keep_last=1))
def save(step):
    store.save(step, {"model": {"w": torch.full((1000,), float(step))}}, {"step": step})
save(10)
store.wait()
written = module.save_file
def killed(*arguments):
    written(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
module.save_file = killed
save(20)
store.wait()
"""


@pytest.mark.slow
def test_killed_while_the_thread_writes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert any(name.startswith(".step-00000020") for name in os.listdir(tmp_path)), "the kill came too early to tell"
    found = CheckpointStore(tmp_path, keep_last=1).newest()
    assert (found.step, json.loads((found.folder / "state.json").read_text())) == (10, {"step": 10})
