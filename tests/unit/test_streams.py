"""Standard streams that were closed, are full, have no reader or lack characters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.contract import streams
from paceline.contract.streams import Screen, whole_streams, write_error

OPENED = """
import os, sys
from paceline.contract.streams import flush_output, open_standard_streams
open_standard_streams(output_is_needed={needed})
{body}
flush_output(is_failing={failing})
"""


def start(body: str, *, needed: bool = True, failing: bool = False, **streams: Any) -> subprocess.Popen[bytes]:
    code = OPENED.format(needed=needed, failing=failing, body=body)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, "-c", code], **{"env": environment, **streams})


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code, and what was written on standard error."""
    _, told = process.communicate(timeout=60)
    return process.returncode, (told or b"").decode()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_opened_where_nothing_is_written(closed: str, tmp_path: Path) -> None:
    body = (
        "with open('data', 'w') as data:\n"
        "    print('to nobody', flush=True); os.system('echo to nobody; echo to nobody >&2')\n"
        "    sys.stderr.write('to nobody'); sys.stdin.read()\n"
        "    data.write(str(data.fileno()))"
    )
    code = OPENED.format(needed=True, failing=False, body=body)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert int((tmp_path / "data").read_text()) > 2, "a file has the number of a standard stream"


@pytest.mark.parametrize(
    ("needed", "failing", "code"), [(True, False, 141), (False, False, 0), (True, True, 0)], ids=str
)
@pytest.mark.parametrize("body", ["print('x' * 10**6)", "print('x')"], ids=["while it writes", "at its end"])
def test_a_reader_that_left(body: str, needed: bool, failing: bool, code: int) -> None:
    if failing and "10**6" in body:
        code = 141  # before it fails
    reading, writing = os.pipe()
    os.close(reading)
    process = start(body, needed=needed, failing=failing, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert ended(process) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_output_without_room_is_told_once() -> None:
    with open("/dev/full", "wb") as full:
        result = ended(start("print('x')", stdout=full, stderr=subprocess.PIPE))
        assert result == (2, "paceline: standard output cannot be written: No space left on device\n")
        assert ended(start("print('x')", needed=False, stdout=full, stderr=subprocess.PIPE)) == (0, "")
        assert ended(start("sys.stderr.write('x'); print('y')", stdout=subprocess.DEVNULL, stderr=full))[0] == 0


def test_a_full_pipe_that_does_not_block_gets_all() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = start("print('x' * 10**6)", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    parts: list[bytes] = []

    def read() -> None:
        while part := os.read(reading, 4096):
            parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    assert ended(process) == (0, "")
    reader.join()
    os.close(reading)
    assert b"".join(parts) == b"x" * 10**6 + b"\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_every_character_can_be_written(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": unbuffered}
    body = r"print('\u732b \udcff'); sys.stderr.write('\u732b \udcff')"
    process = start(body, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (out, err) == (b"\\u732b \\udcff\n", b"\\u732b \\udcff")


class Log:
    """A stream that a caller made, with no more than this."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_a_stream_of_a_callers_own() -> None:
    log: Any = Log()
    screen = Screen(log)
    screen.write("a line\n")
    screen.flush()
    assert (log.text, screen.isatty()) == ("a line\n", False)
    with pytest.raises(OSError, match="fileno"):
        screen.fileno()


def test_no_stream_and_one_that_was_closed() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        screen = Screen(stream)
        assert screen.write("a line\n") == 7
        screen.flush()
        assert not screen.isatty()


def test_libraries_find_whole_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = Log()
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr(sys, "stderr", None)
    with whole_streams():
        assert not sys.stdout.isatty()
        sys.stdout.write("told")
        sys.stderr.write("to nobody")
    assert (sys.stdout, sys.stderr, log.text) == (log, None, "told")
    write_error("to nobody")


def test_whole_streams_are_left_as_they_are() -> None:
    before = sys.stdout
    with whole_streams():
        assert sys.stdout is before


def test_the_exit_code_is_that_of_a_broken_pipe() -> None:
    assert streams.READER_GONE == 128 + 13
