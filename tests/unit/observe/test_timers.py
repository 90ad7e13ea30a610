"""Seconds by span."""

from __future__ import annotations

import threading

from paceline.contract.spans import listening, mark, span
from paceline.observe.timers import Timers, Timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_added_up_and_those_inside_are_not_a_spans_own() -> None:
    clock = Clock()
    timers = Timers(clock)
    with listening(timers):
        for _ in range(2):
            with span("step"):
                clock.now += 1
                with span("forward"):
                    clock.now += 4
                mark("captured")
                with span("update"):
                    clock.now += 2
    assert timers.found == {"forward": Timing(2, 8, 8), "update": Timing(2, 4, 4), "step": Timing(2, 14, 2)}


def test_a_span_within_one_of_its_own_name_counts_twice_in_all_and_once_as_its_own() -> None:
    clock = Clock()
    timers = Timers(clock)
    with listening(timers), span("step"), span("step"):
        clock.now += 3
    assert timers.found["step"] == Timing(2, 6, 3)


def test_threads_do_not_see_one_anothers_spans() -> None:
    timers = Timers()
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with span("checkpoint"):
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=other)
    with listening(timers):
        with span("step"):
            thread.start()
            assert inside.wait(10)
        over.set()
        thread.join(10)
    step = timers.found["step"]
    assert step.own == step.seconds, "the other thread's span was taken for one inside"
    assert timers.found["checkpoint"].count == 1
