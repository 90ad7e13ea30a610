"""A process that is asked, and answers, in lines of JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from paceline.contract.child import Child
from paceline.contract.interpreter import python

ECHO = """
import json, sys
from paceline.contract.child import take_over_output
send = take_over_output()
print("loading")
for line in sys.stdin:
    asked = json.loads(line)
    if "end" in asked:
        sys.exit("ImportError: nothing here")
    send({"got": asked})
"""


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(python("-c", ECHO))
    yield child
    child.kill()
    child.close()


def test_each_request_has_its_answer_and_prints_are_none(child: Child) -> None:
    for number in range(3):
        child.ask({"number": number, "text": "é\n"})
        assert child.answer() == {"got": {"number": number, "text": "é\n"}}
    assert child.printed() == "loading"
    child.close()
    assert child.wait() == 0


def test_one_that_ends_gives_no_answer_and_its_last_words_are_kept(child: Child) -> None:
    child.ask({"end": True})
    assert child.answer() == {}
    assert child.wait(30) == 1
    assert child.last_line() == ": ImportError: nothing here"
    child.ask({"number": 1})
    assert child.answer() == {}


def test_one_that_is_killed_takes_what_it_forked_along() -> None:
    code = "import os, time; os.fork(); print('{\"x\": 1}', flush=True); time.sleep(60)"
    child = Child([sys.executable, "-I", "-S", "-c", code])
    assert child.answer() == {"x": 1}
    child.kill()
    begun = time.monotonic()
    child.close()  # waits for the end of the pipe, which both hold
    assert child.wait() == -9
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("line", ["[1]", "3", '{"cut', ""])
def test_what_is_no_answer_is_empty(line: str) -> None:
    child = Child([sys.executable, "-I", "-S", "-c", f"print({line!r})"])
    assert child.answer() == {}
    child.close()
