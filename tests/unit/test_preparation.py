"""Work beside the main thread: it comes out where it is waited for, and ends early when nobody will."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from paceline.data.encode import KeepGoing
from paceline.errors import DataError
from paceline.preparation import _Beside
from paceline.stopwatch import Stopwatch


def test_work_runs_beside_and_is_counted_there() -> None:
    watch = Stopwatch()
    met = threading.Barrier(2)

    def work(keep_going: KeepGoing) -> int:
        keep_going()
        met.wait(5)  # only another thread can come here too
        time.sleep(0.02)
        return 7

    with _Beside(watch) as beside, watch.phase("import"):
        future = beside.start("data", work)
        met.wait(5)
    assert future.result() == 7
    assert watch.overlapped()["data"] >= 0.02
    assert "data" not in watch.seconds()


def test_an_error_there_is_raised_where_the_result_is_waited_for() -> None:
    def work(keep_going: KeepGoing) -> None:
        raise DataError("bad")

    with pytest.raises(DataError, match="bad"), _Beside(Stopwatch()) as beside:
        beside.start("data", work).result()


def test_when_the_main_thread_fails_the_work_is_broken_off() -> None:
    started = threading.Event()

    def endless(keep_going: KeepGoing) -> None:
        started.set()
        while True:
            keep_going()
            time.sleep(0.001)

    with contextlib.suppress(KeyError), _Beside(Stopwatch()) as beside:
        future = beside.start("data", endless)
        assert started.wait(5)
        raise KeyError
    assert future.done(), "the thread outlives the run"
