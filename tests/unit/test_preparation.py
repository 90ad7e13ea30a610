"""Work beside the main thread comes out where it is waited for, and ends early when nobody will; nothing is kept."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from paceline.contract.errors import DataError
from paceline.contract.stopwatch import Stopwatch, process_start
from paceline.data.encode import KeepGoing
from paceline.machine.facts import this_machine
from paceline.prepare.beside import Beside
from paceline.prepare.preparation import _gpu_here, _wake, prepare_run
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.testing.tiny import tiny_bert_config


def test_work_runs_beside_and_is_counted_there() -> None:
    watch = Stopwatch()
    met = threading.Barrier(2)

    def work(keep_going: KeepGoing) -> int:
        keep_going()
        met.wait(5)  # only another thread can come here too
        time.sleep(0.02)
        return 7

    with Beside(watch) as beside, watch.phase("import"):
        future = beside.start("data", work)
        met.wait(5)
    assert future.result() == 7
    assert watch.overlapped()["data"] >= 0.02
    assert "data" not in watch.seconds()


def test_an_error_there_is_raised_where_the_result_is_waited_for() -> None:
    def work(keep_going: KeepGoing) -> None:
        raise DataError("bad")

    with pytest.raises(DataError, match="bad"), Beside(Stopwatch()) as beside:
        beside.start("data", work).result()


def test_when_the_main_thread_fails_the_work_is_broken_off() -> None:
    started = threading.Event()

    def endless(keep_going: KeepGoing) -> None:
        started.set()
        while True:
            keep_going()
            time.sleep(0.001)

    with contextlib.suppress(KeyError), Beside(Stopwatch()) as beside:
        future = beside.start("data", endless)
        assert started.wait(5)
        raise KeyError
    assert future.done(), "the thread outlives the run"


def test_weights_that_shards_take_the_place_of_are_let_go() -> None:
    """With the collector's freeze, which a command makes after its imports, a frame that kept them would keep them."""
    recipe = Recipe.parse(
        {
            "model": {"config": tiny_bert_config(vocab_size=200)},
            "data": {"source": "builtin:random", "random": {"samples": 32, "length": 8, "vocabulary": 200}},
            "device": "cpu",
        }
    )
    facts = this_machine()
    chosen, decisions = choose(recipe, facts)
    try:
        prepared = prepare_run(chosen, decisions, facts=facts, watch=Stopwatch(process_start()))
        kept = [weakref.ref(parameter) for parameter in prepared.build.model.parameters()]
        for module in prepared.build.model.modules():  # as sharding does
            module._parameters = {name: nn.Parameter(torch.zeros(1)) for name in module._parameters}
        gc.collect()
        assert [reference() for reference in kept if reference() is not None] == []
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("is_initialized", "gpu"), [(True, "cuda:1"), (False, "cuda:0")])
def test_a_rank_wakes_its_own_gpu(monkeypatch: pytest.MonkeyPatch, is_initialized: bool, gpu: str) -> None:
    """A new thread is on GPU 0: rank 1's had a context there too, 612 MiB, and so had every further rank's."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made: list[torch.device] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: made.append(device))
    _wake(_gpu_here(), lambda: None)
    assert [str(device) for device in made] == [gpu]
