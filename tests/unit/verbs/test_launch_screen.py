"""What ranks write becomes whole lines, whatever they write."""

from __future__ import annotations

import io
import os

from paceline.verbs.launch.screen import LONGEST_LINE_BYTES, TAIL_LINES, Errors, Lines, Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Narrow(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]


def lines_of(*writes: bytes) -> list[str]:
    """What a rank that writes these and ends is passed on as."""
    reading, writing = os.pipe()
    found: list[str] = []
    lines = Lines(reading, found.append)
    for written in writes:
        os.write(writing, written)
        lines.read()
    os.close(writing)
    lines.drain()
    assert not lines.is_open, "the end was not noticed"
    lines.close()
    return found


def test_lines_are_put_together_from_pieces() -> None:
    assert lines_of(b"one\ntw", b"o\n", b"\nthree") == ["one", "two", "", "three"]
    assert lines_of() == []
    assert lines_of("später\n".encode()[:3], "später\n".encode()[3:]) == ["später"]


def test_of_a_bar_its_last_state_is_passed_on() -> None:
    assert lines_of(b" 1%\r 50%\r100%\ndone\r\n") == ["100%", "done"]


def test_bytes_that_are_no_text_and_lines_without_an_end() -> None:
    assert lines_of(b"\xff\xfe\n") == ["\\xff\\xfe"]
    endless = lines_of(*[b"x" * 30_000] * 5)
    assert "".join(endless) == "x" * 150_000
    assert all(len(line) <= LONGEST_LINE_BYTES + 30_000 for line in endless)


def test_reading_never_waits() -> None:
    reading, writing = os.pipe()
    lines = Lines(reading, lambda line: None)
    lines.read()
    assert lines.is_open
    os.close(writing)
    lines.close()
    lines.close()
    lines.read()


def test_a_screen_keeps_its_terminal_and_outlives_its_reader() -> None:
    stream = Terminal()
    Screen(stream).say("a line")
    assert stream.getvalue() == "\r\x1b[Ka line\n", "it would stand beside rank 0's bar"
    narrow = Narrow()
    Screen(narrow).say("später")
    assert narrow.getvalue() == "sp\\xe4ter\n"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as pipe:
        gone = Screen(pipe)
        gone.say("nobody reads this")
        gone.say("nor this")
        # what is left in its buffer would be written once more on closing
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), writing)


def test_errors_are_shown_until_they_are_held() -> None:
    stream = io.StringIO()
    errors = Errors(Screen(stream), "[rank 2]")
    errors.take("a warning")
    assert stream.getvalue() == "[rank 2] a warning\n"
    errors.hold()
    for number in range(300):
        errors.take(f"line {number}")
    assert stream.getvalue() == "[rank 2] a warning\n"
    assert list(errors.tail) == [f"line {number}" for number in range(300 - TAIL_LINES, 300)]
    errors.release()
    errors.release()
    assert stream.getvalue().splitlines()[-1] == "[rank 2] line 299"
    assert len(stream.getvalue().splitlines()) == 1 + TAIL_LINES
