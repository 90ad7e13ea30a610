"""Spans: who hears of them, when, and what they cost where nobody does."""

from __future__ import annotations

import subprocess
import sys
import threading
import timeit
from contextlib import ExitStack

import pytest

import paceline
from paceline.contract.errors import UserError
from paceline.contract.spans import Sink, listening, mark, pop, push, span


class Notes(Sink):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, int | None]] = []

    def begin(self, name: str, step: int | None) -> None:
        self.told.append(("begin", name, step))

    def end(self, name: str) -> None:
        self.told.append(("end", name, None))

    def mark(self, name: str, step: int | None) -> None:
        self.told.append(("mark", name, step))


def test_spans_are_heard_of_in_order_and_nested() -> None:
    notes = Notes()
    with listening(notes), span("step", step=3):
        with span("forward", step=3):
            mark("captured", step=3)
        mark("done")
    assert notes.told == [
        ("begin", "step", 3),
        ("begin", "forward", 3),
        ("mark", "captured", 3),
        ("end", "forward", None),
        ("mark", "done", None),
        ("end", "step", None),
    ]


def test_an_exception_ends_its_spans_and_goes_on() -> None:
    notes = Notes()
    with listening(notes), pytest.raises(KeyError), span("step"), span("forward"):
        raise KeyError
    assert [event[:2] for event in notes.told[2:]] == [("end", "forward"), ("end", "step")]


def test_a_decorated_function_is_a_span_each_time_also_within_itself() -> None:
    notes = Notes()

    @span("factorial")
    def factorial(n: int) -> int:
        """Of n."""
        return n * factorial(n - 1) if n else 1

    with listening(notes):
        assert factorial(2) == 2
    assert [event[0] for event in notes.told] == ["begin"] * 3 + ["end"] * 3
    assert (factorial.__name__, factorial.__doc__) == ("factorial", "Of n.")


def test_pushed_spans_end_last_first_each_thread_its_own() -> None:
    notes = Notes()
    with listening(notes):
        push("epoch", step=1)
        push("step", step=1)
        problems: list[UserError] = []

        def elsewhere() -> None:
            try:
                pop()
            except UserError as error:
                problems.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
        pop()
        pop()
    assert len(problems) == 1, "a thread ended another's span"
    assert [event[:2] for event in notes.told] == [
        ("begin", "epoch"),
        ("begin", "step"),
        ("end", "step"),
        ("end", "epoch"),
    ]
    with pytest.raises(UserError, match="no span that is still open"):
        pop()


def test_who_heard_the_beginning_hears_the_end_and_nobody_else() -> None:
    early, late = Notes(), Notes()
    with ExitStack() as stack:
        stack.enter_context(listening(early))
        with span("step"), listening(late), span("forward"):
            stack.close()  # early listens no more
        assert [event[:2] for event in early.told] == [("begin", "step"), ("begin", "forward"), *_ends()]
        assert [event[:2] for event in late.told] == [("begin", "forward"), ("end", "forward")]


def _ends() -> list[tuple[str, str]]:
    return [("end", "forward"), ("end", "step")]


def test_one_sink_may_listen_twice() -> None:
    notes = Notes()
    with listening(notes):
        with listening(notes):
            mark("twice")
        mark("once")
    mark("not at all")
    assert [event[1] for event in notes.told] == ["twice", "twice", "once"]


def test_where_nothing_listens_a_span_costs_next_to_nothing() -> None:
    def one() -> None:
        with span("forward", step=12):
            pass

    # the best of many short tries: other processes take the rest
    seconds = min(timeit.repeat(one, number=500, repeat=200)) / 500
    assert seconds < 1e-6, f"{1e6 * seconds:.2f} us a span"


def test_the_public_names_are_these_and_load_nothing() -> None:
    assert (paceline.span, paceline.push, paceline.pop, paceline.mark) == (span, push, pop, mark)
    told = "import sys, paceline; paceline.span; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", told], check=True, timeout=60)
