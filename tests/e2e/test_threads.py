"""Threads of one process: they share torch's generator, and a training has the numbers of one alone or is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.contract.errors import UserError
from paceline.contract.exclusive import exclusive
from paceline.engine.step import Step
from tests.e2e.whole_runs import assert_same, outcome, recipe


def run_in_thread(call: Callable[[], object], *, seconds: float = 60) -> list[Any]:
    """Call it in a thread of its own; returns its result or its error."""
    results: list[Any] = []

    def catch() -> None:
        try:
            results.append(call())
        except UserError as error:
            results.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    return results


@pytest.fixture
def amid_a_step(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Calls that are made, once, after the first micro-batch of a training, by the thread that trains."""
    calls: list[Callable[[], object]] = []
    micro = Step.micro

    def micro_then_call(self: Step, *arguments: Any) -> Any:
        while calls:
            calls.pop()()
        return micro(self, *arguments)

    monkeypatch.setattr(Step, "micro", micro_then_call)
    return calls


@pytest.fixture
def alone(pretrained: Path, reviews: Path, tmp_path: Path) -> paceline.RunRecord:
    """A finished run, with no other thread at work."""
    return paceline.train(recipe(pretrained, reviews), out=tmp_path / "alone")


@pytest.mark.parametrize("verb", ["train", "resume", "evaluate", "predict", "adopt"])
def test_nothing_of_another_thread_disturbs_a_training(
    verb: str,
    alone: paceline.RunRecord,
    pretrained: Path,
    reviews: Path,
    tmp_path: Path,
    amid_a_step: list[Callable[[], object]],
) -> None:
    folder, expected = Path(alone.folder), outcome(alone)
    model = torch.nn.Linear(2, 2)
    engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: model(batch).sum())
    verbs: dict[str, Callable[[], object]] = {
        "train": lambda: paceline.train(recipe(pretrained, reviews), out=tmp_path / "second"),
        "resume": lambda: paceline.resume(folder, ["loop.max_steps=14", "loop.epochs=4"]),
        "evaluate": lambda: paceline.evaluate(folder),
        "predict": lambda: paceline.predict(folder, ["a fine evening"]),
        "adopt": lambda: engine.accumulate([torch.ones(1, 2)], 1),
    }
    results: list[Any] = []
    amid_a_step.append(lambda: results.extend(run_in_thread(verbs[verb])))
    record = paceline.train(recipe(pretrained, reviews), out=tmp_path / "first")
    [error] = results
    assert isinstance(error, UserError), error
    assert "of this process trains" in error.what
    assert "process of its own" in error.fix
    assert not (tmp_path / "second").exists(), "a refused training leaves a folder"
    assert_same(outcome(record), expected)


def test_predictions_in_threads_take_turns(alone: paceline.RunRecord) -> None:
    folder, texts = alone.folder, [f"a fine evening {number}" for number in range(8)]
    expected = paceline.predict(folder, texts)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(paceline.predict(folder, texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 4


def test_one_verb_within_another_of_the_same_thread() -> None:
    with exclusive("outer", trains=True), exclusive("inner", trains=False):
        pass
    with exclusive("outer", trains=False), exclusive("inner", trains=True):
        [error] = run_in_thread(lambda: enter("other"))
        assert isinstance(error, UserError)
    assert run_in_thread(lambda: enter("other")) == ["entered"]


def enter(verb: str) -> str:
    with exclusive(verb, trains=True):
        return "entered"


def test_a_training_waits_for_a_prediction() -> None:
    order: list[str] = []
    begun = threading.Event()

    def predict() -> None:
        with exclusive("predict", trains=False):
            begun.set()
            time.sleep(0.2)
            order.append("predicted")

    thread = threading.Thread(target=predict)
    thread.start()
    assert begun.wait(10)
    order.append(enter("train"))
    thread.join()
    assert order == ["predicted", "entered"]


def test_a_failure_lets_the_next_one_in() -> None:
    with pytest.raises(KeyError), exclusive("train", trains=True):
        raise KeyError
    assert run_in_thread(lambda: enter("next")) == ["entered"]


def test_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    script = (
        "import os, threading, time; from paceline.contract.exclusive import exclusive\n"
        "def hold():\n"
        "    with exclusive('train', trains=True): held.set(); time.sleep(30)\n"
        "held = threading.Event(); threading.Thread(target=hold, daemon=True).start(); held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with exclusive('predict', trains=False): os._exit(7)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 7
