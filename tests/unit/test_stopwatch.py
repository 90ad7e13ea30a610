"""Every second has a name: phases, those inside others, those of other threads, and what came before."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time

import pytest

from paceline.contract import stopwatch
from paceline.contract.stopwatch import Stopwatch, process_start


class Clock:
    """Stands in for ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("paceline.contract.stopwatch.time.perf_counter", made)
    return made


def test_a_phase_inside_another_is_taken_out_of_it(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.phase("train"):
        clock.now += 1
        with watch.phase("capture"):
            clock.now += 2
            with watch.phase("train"):
                clock.now += 4
        clock.now += 8
    clock.now += 16
    assert watch.seconds() == {"train": 13.0, "capture": 2.0, "other": 16.0, "total": 31.0}


def test_the_start_of_the_process_is_a_phase_and_a_call_has_none(clock: Clock) -> None:
    assert Stopwatch(since=97.5).seconds() == {"start": 2.5, "other": 0.0, "total": 2.5}
    assert Stopwatch().seconds() == {"other": 0.0, "total": 0.0}


def test_the_first_mark_of_a_name_counts_from_the_start(clock: Clock) -> None:
    watch = Stopwatch(since=90.0)
    assert watch.marked("first_update") is None
    for _ in range(2):
        clock.now += 5
        watch.mark("first_update")
    assert watch.marked("first_update") == 15.0


def test_a_resumed_run_goes_on_counting(clock: Clock) -> None:
    watch = Stopwatch(since=99.0)
    with watch.phase("train"):
        clock.now += 2
    watch.add({"start": 3.0, "train": 10.0, "other": 1.0, "total": 14.0})
    assert watch.seconds() == {"start": 4.0, "train": 12.0, "other": 1.0, "total": 17.0}
    watch.mark("first_update")
    assert watch.marked("first_update") == 3.0, "seconds of an earlier process are in it"


def test_phases_of_another_thread_stand_beside_the_sum(clock: Clock) -> None:
    watch = Stopwatch()

    def work() -> None:
        with watch.phase("data"):
            clock.now += 4
            with watch.phase("encode"):
                clock.now += 1

    with watch.phase("import"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        clock.now += 2
    assert watch.seconds() == {"import": 7.0, "other": 0.0, "total": 7.0}
    assert watch.overlapped() == {"data": 4.0, "encode": 1.0}


def test_many_threads_lose_no_second() -> None:
    watch = Stopwatch()

    def work() -> None:
        for _ in range(200):
            with watch.phase("data"):
                pass
        with watch.phase("data"):
            time.sleep(0.02)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.overlapped()["data"] >= 8 * 0.02
    assert set(watch.seconds()) == {"other", "total"}


def test_a_phase_that_fails_is_counted(clock: Clock) -> None:
    watch = Stopwatch()

    def failing() -> None:
        with watch.phase("data"):
            clock.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert watch.seconds()["data"] == 3.0


@pytest.mark.parametrize("name", ["import", "compile"])
@pytest.mark.parametrize("collecting", [True, False])
def test_importing_and_compiling_leave_the_collector_as_it_was(name: str, collecting: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        watch = Stopwatch()
        phase = watch.importing if name == "import" else watch.compiling
        with contextlib.suppress(ImportError), phase():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collecting
        assert name in watch.seconds()
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("phase", ["importing", "compiling"])
def test_in_a_process_of_its_own_what_was_made_is_set_aside(phase: str) -> None:
    code = "import gc, time\nfrom paceline.contract.stopwatch import Stopwatch\n"
    code += "for since in (None, time.perf_counter()):\n"
    code += f"    with Stopwatch(since).{phase}(): pass\n    print(gc.get_freeze_count() > 0, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False True", "True True"], "another's process was touched, or ours was not"


def test_what_compiling_leaves_in_circles_is_let_go_of_before_the_rest_is_set_aside() -> None:
    """It may hold memory of a GPU, and nobody looks through it again."""
    code = "import gc, time, weakref\nfrom paceline.contract.stopwatch import Stopwatch\nclass Held: pass\n"
    code += "with Stopwatch(time.perf_counter()).compiling():\n"
    code += "    held = Held(); held.itself = held; seen = weakref.ref(held); del held\n    print(seen() is not None)\n"
    code += "print(seen() is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process began")
def test_the_start_of_a_process_is_before_its_first_line_and_after_its_parent_asked() -> None:
    code = "import time; a = time.perf_counter(); time.sleep(0.3)\n"
    code += "from paceline.contract.stopwatch import process_start\nprint(process_start(), a)"
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    start, first_line = map(float, done.stdout.split())
    assert before - 0.02 <= start <= first_line, "the clock of all processes of a Linux machine is one"


def test_a_start_that_cannot_be_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.contract.stopwatch._LONGEST_START", -1.0)
    assert process_start() == stopwatch._LOADED
