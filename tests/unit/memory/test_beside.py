"""A plan beside a run: begun with the first update, never waited for long, and gone with the run, however that ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.contract.errors import RecipeError, UserError
from paceline.contract.records import MemoryPlan, Notice
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory import beside as module
from paceline.memory.beside import LONGEST_WAIT_SECONDS, PlanBeside, measured
from paceline.memory.predict import PlanFailed
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.seams import Alone
from tests.testing.tiny import tiny_bert_config
from tests.unit.observe.conftest import Records

pytestmark = pytest.mark.usefixtures("forked_interpreters")

RECORDS = Records()
GPU = gpu_for("h200")
TINY: dict[str, Any] = {
    "model": {"config": tiny_bert_config()},
    "data": {
        "source": "builtin:random",
        "max_length": 16,
        "random": {"samples": 64, "length": 16, "vocabulary": 200},
    },
    "loop": {"batch_size": 8, "epochs": 1},
    "observe": {"console": "off", "report": False},
}
RECIPE = Recipe.parse(TINY)


class StandIn:
    """In the predictor's place: ``answers`` decides what a plan comes to; None: it takes until it is killed."""

    answers: Any = None
    made: list[StandIn]

    def __init__(self, *, niceness: int) -> None:
        self.asked: list[tuple[Recipe, Any, int]] = []
        self.killed, self.num_kills, self.survives = threading.Event(), 0, 0
        self.made.append(self)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def plan(self, recipe: Recipe, gpu: Any, *, world_size: int) -> MemoryPlan:
        self.asked.append((recipe, gpu, world_size))
        if self.answers is None:
            assert self.killed.wait(20), "nobody ended it"
            raise PlanFailed("the tracing process ended without an answer (exit code -9)")
        found = self.answers()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self) -> None:
        self.num_kills += 1
        if self.num_kills > self.survives:
            self.killed.set()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(StandIn, "answers", None)
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    monkeypatch.setattr(module, "Predictor", StandIn)
    return StandIn


def settled(beside: PlanBeside, seconds: float = 60.0) -> MemoryPlan | str:
    """What comes of a plan that is given the time."""
    end = time.monotonic() + seconds
    while "still being made" in str(found := beside.result()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


# ---- when it begins, and what comes of it


def test_it_begins_with_the_first_update_and_once(stand_in: type[StandIn]) -> None:
    stand_in.answers = RECORDS.plan
    beside = PlanBeside(RECIPE, GPU, world_size=3)
    for record in (RECORDS.started(), Notice(message="x"), RECORDS.evaluation(0)):
        beside.observe(record)
    assert beside.result() == "no step was made"
    assert stand_in.made[0].asked == []
    for number in range(1, 5):
        beside.observe(RECORDS.step(number))
    assert settled(beside) == RECORDS.plan()
    assert stand_in.made[0].asked == [(RECIPE, GPU, 3)]
    beside.close()
    beside.close()


def test_the_run_itself_tells_of_its_data(stand_in: type[StandIn]) -> None:
    stand_in.answers = staticmethod(lambda: replace(RECORDS.plan(), notices=("a class of one row",)))
    beside = PlanBeside(RECIPE, GPU)
    beside.start()
    assert settled(beside) == RECORDS.plan(), "the summary would have the notice twice"
    beside.close()


def test_a_run_that_cannot_be_planned_says_why_and_nothing_is_tried(stand_in: type[StandIn]) -> None:
    beside = PlanBeside(RECIPE, GPU, obstacle="the rows are in memory")
    beside.observe(RECORDS.step(1))
    assert beside.result() == "the rows are in memory"
    assert stand_in.made[0].asked == []
    beside.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RecipeError("a = 1", "it is 2", "set b"), "a = 1: it is 2"),
        (UserError("2 GPUs"), "2 GPUs"),
        (
            PlanFailed("Traceback\n  File\nKeyError: 'x'"),
            "it failed (KeyError: 'x'); paceline plan runs/x tells the whole of it",
        ),
        (OSError("no memory"), "it failed (no memory); paceline plan runs/x tells the whole of it"),
        (RuntimeError(), "it failed (RuntimeError); paceline plan runs/x tells the whole of it"),
    ],
)
def test_what_goes_wrong_is_told_in_place_of_the_plan(stand_in: type[StandIn], error: Exception, said: str) -> None:
    stand_in.answers = staticmethod(lambda: error)
    beside = PlanBeside(RECIPE, GPU, command="paceline plan runs/x")
    beside.start()
    assert settled(beside) == said
    beside.close()


def test_a_machine_without_another_thread_goes_on_training(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    beside = PlanBeside(RECIPE, GPU)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        beside.observe(RECORDS.step(1))
    assert beside.result() == "no thread could be started for it: can't start new thread"
    beside.close()


# ---- how long the end of a run waits


def test_a_run_of_moments_does_not_wait(stand_in: type[StandIn]) -> None:
    beside = PlanBeside(RECIPE, GPU, command="paceline plan runs/x --gpu h200")
    beside.start()
    began = time.monotonic()
    found = beside.result()
    assert time.monotonic() - began < 0.5, "a plan that had just begun was waited for"
    assert found == "it was still being made when the run ended; paceline plan runs/x --gpu h200 makes it"
    beside.close()


def test_no_run_waits_longer_than_is_said(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    assert LONGEST_WAIT_SECONDS == 2.0, "docstrings and the recipe's reference say so"
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.2)
    clock = itertools.chain([0.0], itertools.repeat(1e6))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    beside = PlanBeside(RECIPE, GPU)
    beside.start()
    began = time.perf_counter()
    assert "still being made" in str(beside.result())
    assert 0.15 < time.perf_counter() - began < 5
    beside.close()


def test_a_plan_that_is_nearly_made_is_waited_for(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SHARE", 1e6)
    about_to = threading.Event()

    def slowly() -> MemoryPlan:
        about_to.wait(10)
        time.sleep(0.1)
        return RECORDS.plan()

    stand_in.answers = staticmethod(slowly)
    beside = PlanBeside(RECIPE, GPU)
    beside.start()
    time.sleep(0.01)
    about_to.set()
    assert beside.result() == RECORDS.plan()
    beside.close()


# ---- nothing stays


def test_closing_ends_a_plan_under_way_also_one_that_is_only_just_begun(stand_in: type[StandIn]) -> None:
    beside = PlanBeside(RECIPE, GPU)
    predictor = stand_in.made[0]
    predictor.survives = 2  # its process is started in between
    beside.start()
    beside.close()
    assert predictor.num_kills >= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-plan"]


def workers(parent: int) -> list[int]:
    """Processes that ``parent`` started to plan."""
    return [process for process in _processes() if _is_worker(process) and _stat(process)[1:2] == [str(parent)]]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _is_worker(process: int) -> bool:
    try:
        return b"paceline.memory.worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _of_group(leader: int) -> list[int]:
    """Workers in the process group of ``leader``, who may be gone: what it forked."""
    return [process for process in _processes() if _is_worker(process) and _stat(process)[2:3] == [str(leader)]]


def _stat(process: int) -> list[str]:
    """State, parent, process group, ...; see proc(5)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def until(found: Any, what: str, seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return value


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_process_has_the_lowest_priority_and_is_gone_when_the_run_ends_early() -> None:
    others = set(workers(os.getpid()))  # one of them plans for other tests

    def started() -> set[int]:
        return set(workers(os.getpid())) - others

    beside = PlanBeside(RECIPE, GPU)
    beside.start()
    (worker,) = until(started, "no process was started")
    until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == module.NICENESS, "it competes with the run")
    assert os.getpgid(worker) == worker != os.getpgrp(), "Ctrl-C in the terminal would reach it"
    beside.close()
    assert not started()
    assert "it failed" in str(beside.result())


@linux
@pytest.mark.slow
def test_the_process_ends_when_the_run_is_killed() -> None:
    code = """
import os, sys, time
from paceline.memory import beside
from tests.unit.memory.test_beside import GPU, RECIPE, workers
beside.NICENESS = 0
one = beside.PlanBeside(RECIPE, GPU)
one.start()
while not workers(os.getpid()):
    time.sleep(0.01)
print(*workers(os.getpid()), flush=True)
time.sleep(100)
"""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    with run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        time.sleep(1)
        os.kill(run.pid, signal.SIGKILL)
    left = [worker]
    try:
        until(lambda: not _of_group(worker), "it goes on when nobody waits for it", 80)
        left.clear()
    finally:
        for process in left:
            os.killpg(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_real_plan_is_made_beside_and_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NICENESS", 0)  # else other tests go first, for as long as there are any
    chosen, _ = choose(RECIPE, facts_with([GPU], this_machine()))
    beside = PlanBeside(chosen, GPU)
    beside.start()
    found = settled(beside, seconds=100)
    beside.close()
    assert isinstance(found, MemoryPlan), found
    assert found.gpu == "NVIDIA H200"
    assert found.samples == 8
    assert sum(found.parts.values()) == found.allocated


# ---- what is measured


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 1,000 bytes: 100 were allocated at most, 200 reserved, of which 50 were given back; 400 are taken."""
    figures = {
        "max_memory_allocated": 100,
        "max_memory_reserved": 200,
        "memory_reserved": 150,
        "mem_get_info": (600, 1000),
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    return torch.device("cuda")


def test_a_cpu_has_no_record_and_asks_no_gpu() -> None:
    assert measured(torch.device("cpu"), Alone(), None) is None


def test_what_was_given_back_counts_as_taken(gpu: torch.device) -> None:
    found = measured(gpu, Alone(), None)
    assert found is not None
    assert (found.allocated, found.reserved, found.total) == (100, 200, 450)
    assert (found.plan, found.problem) == (None, "")


def test_the_fullest_rank_speaks_for_all(gpu: torch.device) -> None:
    for other, expected in ([120, 130, 140], (120, 130, 140)), ([90, 900, 990], (100, 200, 450)):
        both = SimpleNamespace(gather=lambda own, other=other: [own, other])
        found = measured(gpu, both, None)
        assert found is not None
        assert (found.allocated, found.reserved, found.total) == expected


def test_the_plan_or_why_there_is_none_stands_beside(gpu: torch.device, stand_in: type[StandIn]) -> None:
    stand_in.answers = RECORDS.plan
    beside = PlanBeside(RECIPE, GPU)
    found = measured(gpu, Alone(), beside)
    assert found is not None
    assert (found.plan, found.problem) == (None, "no step was made")
    beside.start()
    assert settled(beside) == RECORDS.plan()
    found = measured(gpu, Alone(), beside)
    assert found is not None
    assert (found.plan, found.problem) == (RECORDS.plan(), "")
    beside.close()


# ---- in a run


def _request(**changes: Any) -> Any:
    facts = SimpleNamespace(gpus=(GPU,))
    folder = SimpleNamespace(recipe=Path("runs/a b/recipe.yaml"))
    return SimpleNamespace(**{"facts": facts, "folder": folder, "rows": None, "world": Alone(), **changes})


def planned(request: Any, **settings: Any) -> PlanBeside | None:
    from paceline.run.run import plan_beside

    recipe = Recipe.parse({**TINY, "device": "cuda", **settings})
    return plan_beside(request, SimpleNamespace(recipe=recipe))  # type: ignore[arg-type]


def test_a_run_on_a_gpu_is_planned(stand_in: type[StandIn]) -> None:
    two = SimpleNamespace(size=2, is_first=True)
    for world, command in (
        (Alone(), "paceline plan 'runs/a b/recipe.yaml' --gpu 'NVIDIA H200'"),
        (two, "paceline plan 'runs/a b/recipe.yaml' --gpu 'NVIDIA H200' --gpus 2"),
    ):
        beside = planned(_request(world=world))
        assert beside is not None
        beside.start()
        assert f"; {command} makes it" in str(beside.result())
        beside.close()
    assert [made.asked[0][1:] for made in stand_in.made] == [(GPU, 1), (GPU, 2)]


def test_dp_has_all_gpus_of_its_process(stand_in: type[StandIn]) -> None:
    request = _request(facts=SimpleNamespace(gpus=(GPU, GPU, GPU)))
    beside = planned(request, parallel={"strategy": "dp"})
    assert beside is not None
    beside.start()
    assert "--gpu 'NVIDIA H200' --gpus 3 makes it" in str(beside.result())
    beside.close()
    assert stand_in.made[0].asked[0][1:] == (GPU, 3)


def test_what_is_not_planned(stand_in: type[StandIn]) -> None:
    assert planned(_request(), device="cpu") is None
    assert planned(_request(), observe={"memory_plan": False}) is None
    assert planned(_request(world=SimpleNamespace(size=2, is_first=False))) is None
    in_memory = planned(_request(rows=[{}]))
    assert in_memory is not None
    in_memory.observe(RECORDS.step(1))
    assert in_memory.result() == "the rows are in memory, and a plan reads them from a file"


@pytest.mark.parametrize("fails", [False, True])
def test_the_plan_of_a_run_begins_with_its_steps_and_ends_with_it(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    from paceline.contract.errors import NonFiniteError
    from paceline.run import run
    from paceline.verbs.train import train

    beside = PlanBeside(RECIPE, GPU)
    monkeypatch.setattr(run, "plan_beside", lambda request, prepared: beside)
    lr = 1e20 if fails else 1e-3
    recipe = Recipe.parse({**TINY, "device": "cpu", "optimizer": {"lr": lr}})
    if fails:
        with pytest.raises(NonFiniteError):
            train(recipe, out=tmp_path / "run")
    else:
        record = train(recipe, out=tmp_path / "run")
        assert (record.memory, record.peak_bytes) == (None, None), "nothing changes without a GPU"
    (predictor,) = stand_in.made
    assert predictor.asked == [(RECIPE, GPU, 1)]
    assert predictor.killed.is_set(), "it goes on when the run has ended"
