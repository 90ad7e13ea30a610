"""One process, watched from outside: when each line of JSON came, how long it took, how much memory, how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.contract.files import disk_errors
from paceline.contract.interpreter import bound

POLL_SECONDS = 0.01
"""How often a followed file is looked at: the error of what is read off it."""

LINGER_SECONDS = 10.0
"""How long a process that left the group may hold on to our end of the pipe."""


@dataclass(frozen=True)
class Line:
    """A JSON object that a process wrote."""

    seconds: float
    """Since the process was started."""
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: str
    """``ok``, ``failed`` or ``timeout``."""
    seconds: float
    """From start to end."""
    lines: tuple[Line, ...]
    """JSON objects of standard output and of the followed file, as they came."""
    error: str
    """The last lines of its log, where it did not end well."""
    code: int = 0
    """Exit code; of a signal its negative number."""
    peak_bytes: int | None = None
    """Most main memory of the process or of one that it started and waited for: the largest of them, not the sum."""

    def first(self, key: str, value: str) -> Line | None:
        """The first line in which ``key`` is ``value``."""
        return next((line for line in self.lines if line.fields.get(key) == value), None)


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    limit_seconds: float,
    follow: Path | None = None,
    folder: Path | None = None,
) -> Outcome:
    """Run ``command`` to its end, or to ``limit_seconds``, when it and what it started are killed.

    It ends with this process, by kill -9 too.

    Args:
        command: program and arguments.
        environment: all its variables.
        log: takes everything that it prints.
        limit_seconds: wall time.
        follow: a file of JSON lines that it writes.
        folder: it is started in; None: this process's own.

    Raises:
        DiskFullError: there is no room for the log.
    """
    with disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        opened = log.open("wb", buffering=0)
    with opened as file:
        started = time.perf_counter()
        process = subprocess.Popen(
            bound(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        printed: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, started, file, printed), daemon=True)
        reader.start()
        followed = _Followed(follow, started) if follow else None
        ended = _Ended(process)
        try:
            timed_out = not _await(ended, started + limit_seconds, followed)
            seconds = time.perf_counter() - started
        finally:
            # loaders and compilers that outlive their process would disturb the next one
            _kill_all(process)
            ended.wait()
            reader.join(LINGER_SECONDS)
    if followed:
        followed.look()
    lines = _parsed([printed.get() for _ in range(printed.qsize())]) + (followed.lines if followed else [])
    status = "timeout" if timed_out else "ok" if ended.code == 0 else "failed"
    error = "" if status == "ok" else _last_lines(log)
    ordered = tuple(sorted(lines, key=lambda line: line.seconds))
    return Outcome(status, seconds, ordered, error, ended.code, ended.peak_bytes)


def _await(ended: _Ended, deadline: float, followed: _Followed | None) -> bool:
    """Wait for the end, or until the deadline, and take in meanwhile what is followed; whether it came to its end."""
    while not ended.yet():
        if time.perf_counter() > deadline:
            return False
        if followed:
            followed.look()
        time.sleep(POLL_SECONDS)
    return True


class _Ended:
    """The end of a process, and what it had used by then, which ``Popen`` does not tell."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.code, self.peak_bytes = 0, 0
        self._over = False

    def yet(self) -> bool:
        """Whether it has ended."""
        return self._look(os.WNOHANG)

    def wait(self) -> None:
        """Until it has ended."""
        self._look(0)

    def _look(self, options: int) -> bool:
        if self._over:
            return True
        pid, status, used = os.wait4(self._process.pid, options)
        if pid:
            self._over, self.code = True, os.waitstatus_to_exitcode(status)
            self.peak_bytes = used.ru_maxrss * 1024  # Linux counts in KiB
            self._process.returncode = self.code
        return self._over


class _Followed:
    """A file that grows by whole lines."""

    def __init__(self, path: Path, started: float) -> None:
        self._path, self._started, self._read = path, started, 0
        self._rest = b""
        self.lines: list[Line] = []

    def look(self) -> None:
        """Take in what came since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        now = time.perf_counter() - self._started
        self._read += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        self.lines += _parsed([(now, line) for line in whole])


def _read(stream: IO[bytes], started: float, log: IO[bytes], lines: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with stream:
        for line in stream:
            lines.put((time.perf_counter() - started, line))
            with contextlib.suppress(OSError):  # a full disk; the line is at hand all the same
                log.write(line)


def _parsed(lines: Sequence[tuple[float, bytes]]) -> list[Line]:
    found = []
    for seconds, line in lines:
        if not line.startswith(b"{"):
            continue
        try:
            fields = json.loads(line)
        except ValueError:  # not ours: somebody printed a brace
            continue
        found.append(Line(seconds, fields))
    return found


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Its group, and what it started in sessions of their own, as torchrun starts ranks."""
    left = _descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(ancestor: int) -> list[int]:
    """Process ids of its children, their children and so on; on Linux."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # the name before may hold anything; after it: state, parent
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows on the way
        found += children.get(pid, ())
    return found


def _last_lines(log: Path) -> str:
    """What a person would look at first: the end of the log."""
    text = log.read_text(errors="replace").rstrip("= \n")  # torchrun underlines the cause
    return text[-2000:]
