"""A process that was asked to stop, and is deaf to it, is ended all the same; here without torch, and soon."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from paceline.contract.errors import Preempted
from paceline.contract.signals import SIGNALS, DeafChildren
from paceline.contract.stop import Stop

DEAF = """
import os, signal, sys, threading, time
import paceline.contract.last_resort as last_resort, paceline.contract.stop as stop
from paceline.contract.last_resort import LastResort
from paceline.contract.signals import SIGNALS

last_resort.GIVE_UP_SECONDS = stop.GIVE_UP_SECONDS = 0.3


def end(number, words):
    print(f"{number.name}: {words}", flush=True)
    return 75


def deaf(seconds):
    is_said, until = False, time.monotonic() + seconds
    while time.monotonic() < until or not is_said:
        try:
            if not is_said:
                is_said = True
                print("deaf", flush=True)
            time.sleep(0.05)
        except BaseException:
            pass


resort = LastResort(SIGNALS, end)
with stop.Stop("start it again", resort) as asked:
    {body}
resort.close()
print("seen through", asked.requested_by, flush=True)
"""


def ended(body: str, *numbers: signal.Signals) -> tuple[int, str, float]:
    """Exit code, output and seconds of a process that is sent signals when it says that it is deaf."""
    process = subprocess.Popen([sys.executable, "-c", DEAF.replace("{body}", body)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "deaf\n"
        began = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        said = process.stdout.read()
        return process.wait(30), said, time.monotonic() - began


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_what_swallows_the_interruption_is_ended(number: signal.Signals) -> None:
    code, said, seconds = ended("deaf(60)", number)
    assert (code, said) == (75, f"{number.name}: start it again\n")
    assert 0.25 < seconds < 20


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("\n    with asked.noted(): deaf(2)", 0, "seen through SIGTERM\n"),
        ("\n    with asked.noted(lambda: 0.2): deaf(60)", 75, "SIGTERM: start it again\n"),
        ("\n    with asked.noted(lambda: 60): deaf(2)", 0, "seen through SIGTERM\n"),
        ("\n    with asked.noted(), asked.at_once('never mind'): deaf(60)", 75, "SIGTERM: never mind\n"),
        ("\n    asked.given_up = lambda: 'go on'\n    deaf(60)", 75, "SIGTERM: go on\n"),
        # what comes after a stretch that is seen through has its own time
        ("\n    with asked.noted(): deaf(1)\n    deaf(60)", 75, "deaf\nSIGTERM: start it again\n"),
        # one that is entered in another has the same last resort
        ("\n    with stop.Stop('inner'): deaf(60)", 75, "SIGTERM: inner\n"),
    ],
)
def test_what_is_seen_through_has_its_time(body: str, code: int, said: str) -> None:
    found = ended(body, signal.SIGTERM)
    assert found[:2] == (code, said)


def test_the_signal_of_a_forked_child_is_not_its_parents() -> None:
    body = "\n    child = os.fork()\n    deaf(1) if child else (time.sleep(0.3), os.kill(os.getpid(), 15), os._exit(0))"
    code, said, _ = ended(body)
    assert (code, said) == (0, "seen through None\n")


def test_a_forked_child_that_lives_longer_holds_nothing_up() -> None:
    """It has the pipe's writing end too, so that the reading end never comes to its end by itself."""
    body = "\n    os.fork() or (os.close(1), time.sleep(6), os._exit(0))\n    deaf(0)"
    code, said, seconds = ended(body)
    assert (code, said) == (0, "seen through None\n")
    assert seconds < 5


def test_a_forked_child_that_unwinds_takes_the_last_resort_from_nobody() -> None:
    body = "\n    child = os.fork()\n    child or (resort.close(), os._exit(0))\n    os.waitpid(child, 0), deaf(60)"
    code, said, _ = ended(body, signal.SIGTERM)
    assert (code, said) == (75, "SIGTERM: start it again\n")


def test_without_a_signal_nothing_is_left_of_it() -> None:
    code, said, _ = ended("deaf(0)")
    assert (code, said) == (0, "seen through None\n")


def test_a_stop_that_was_noted_interrupts_where_nothing_is_lost() -> None:
    reached: list[str] = []

    def work(stop: Stop) -> None:
        with stop.noted():
            signal.raise_signal(signal.SIGTERM)
            reached.append("after the signal")
            with stop.at_once("never mind"):
                reached.append("inside")

    with pytest.raises(Preempted, match="stopped by SIGTERM; never mind"), Stop("go on") as stop:
        work(stop)
    assert reached == ["after the signal"]


def test_a_child_is_deaf_and_this_process_is_not() -> None:
    asleep = [sys.executable, "-I", "-S", "-c", "print(flush=True); import time; time.sleep(1)"]
    with DeafChildren():
        child = subprocess.Popen(asleep, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        for number in SIGNALS:
            child.send_signal(number)
        assert child.wait(30) == 0
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_who_tells_of_the_end_knows_the_signal() -> None:
    code, out, _ = ended("asked.given_up = lambda: f'by {asked.asked_by}'; deaf(5)", signal.SIGUSR2)
    assert (code, out) == (75, "SIGUSR2: by SIGUSR2\n")


STOPPED = """
import atexit, os, signal, sys, threading, time
import paceline.verbs.cli as cli
from paceline.__main__ import main


class Teardown:
    def __del__(self):
        os.abort()  # as C++ does when a thread of its own returns to an interpreter that is gone


def command():
    threading.Thread(target=lambda: (time.sleep(0.3), print("a thread has ended"))).start()
    sys.stderr.write("half a line")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


teardown = Teardown()
atexit.register(print, "exit functions have run")
cli.main = command
sys.argv[:] = ["paceline", "train"]
main()
"""


def test_the_teardown_of_python_cannot_abort_a_command_that_was_stopped() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75, done.stderr
    assert done.stdout == "a thread has ended\nexit functions have run\n"
    assert done.stderr.startswith("half a linepaceline: stopped by SIGTERM")
