"""A process of ours that is asked, and answers, in lines of JSON: both ends of the pipe.

What it prints beside its answers, and the traceback of its end, is kept for who asks why none came.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, final


@final
class Child:
    """Start a process in a group of its own: Ctrl-C is for this one, which ends that one with all that it forked.

    Args:
        command: the program and its arguments.
        environment: all its variables; None: this process's.
        niceness: as of nice(1): 0, or up to 19, where everything else goes first.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, niceness: int = 0
    ) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self.answers: IO[str] = self._process.stdout
        if niceness:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PGRP, self._process.pid, niceness)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; one that has ended gives no answer."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer; empty where it ended without one."""
        try:
            answer = json.loads(self.answers.readline())
        except ValueError:  # there is none, or its end cut it in two
            return {}
        return answer if isinstance(answer, dict) else {}

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end, but not for longer; return its exit code, None where it goes on."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def printed(self) -> str:
        """Return what it wrote to standard error."""
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace").strip()

    def last_line(self) -> str:
        """Return the last line that it wrote to standard error, after a colon; empty where it wrote none."""
        lines = self.printed().splitlines()
        return f": {lines[-1]}" if lines else ""

    def kill(self) -> None:
        """End it at once, with what it forked; an answer that another thread is waiting for is empty."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Say that there are no more requests, and wait for its end."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: its pipes are closed already
            self._process.communicate()
        self._process.wait()
        self._printed.close()


def take_over_output() -> Callable[[Mapping[str, Any]], None]:
    """Return what sends an answer from this process, whose libraries print to standard error from now on."""
    out, sys.stdout = sys.stdout, sys.stderr

    def send(answer: Mapping[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return send
