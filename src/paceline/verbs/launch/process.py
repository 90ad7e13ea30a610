"""One rank as its launcher sees it: a process, what it writes, and what it tells of its failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from paceline.contract.interpreter import bound
from paceline.distributed.failures import REPORT_FD
from paceline.distributed.sockets import STORE_FD
from paceline.verbs.launch.causes import PREEMPTED, Failure
from paceline.verbs.launch.screen import Errors, Lines, Screen

REPORT = {"at", "code", "message", "is_bug", "is_own", "lost", "where"}
"""What ``paceline.distributed.failures.tell_launcher`` writes."""


@final
class RankProcess:
    """A started rank.

    It has a session of its own, so that Ctrl-C reaches it through the launcher alone, and once. Rank 0 has the
    launcher's standard output and error, that its progress bar can be drawn; the others' come through pipes.

    Args:
        rank: its number.
        command: program and arguments.
        environment: its variables.
        store: the socket that rank 0 of one machine inherits; None for the others.
        out: where the lines of its standard output go.
        err: where those of its standard error go.
        name: what stands before its lines.
        draws: whether it has the launcher's own output and error.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        store: socket.socket | None,
        out: Screen,
        err: Screen,
        *,
        name: str,
        draws: bool,
    ) -> None:
        self.rank = rank
        self._draws = draws
        self.code: int | None = None
        """Exit code, as shells count; None while it runs."""
        self.told: dict[str, Any] | None = None
        """What it first told of its failure."""
        self.collectives: dict[str, Any] = {}
        """What it first told of its last collectives, as ``recorded`` has them."""
        self._ended_at = 0.0
        self._asked_to_end_at: float | None = None
        self._errors = Errors(err, name)
        reports, telling = os.pipe()
        try:
            descriptors = [telling] if store is None else [telling, store.fileno()]
            variables = {**environment, REPORT_FD: str(telling)}
            if store is not None:
                variables[STORE_FD] = str(store.fileno())
            if not draws:
                variables.setdefault("PYTHONUNBUFFERED", "1")
            self._process = subprocess.Popen(
                bound(command),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=None if draws else subprocess.PIPE,
                stderr=None if draws else subprocess.PIPE,
                start_new_session=True,
                pass_fds=descriptors,
                bufsize=0,
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(telling)
        self.lines = [Lines(reports, self._hear)]
        """What it writes, and tells."""
        for stream, take in (
            (self._process.stdout, lambda line: out.say(f"{name} {line}")),
            (self._process.stderr, self._errors.take),
        ):
            if stream is not None:
                self.lines.append(Lines(os.dup(stream.fileno()), take))
                stream.close()

    def look(self) -> None:
        """Notice its end, and take in what it wrote before."""
        if self.code is not None:
            return
        code = self._process.poll()
        if code is not None:
            self._ended_at = time.monotonic()
            self.code = code if code >= 0 else 128 - code
            self._kill_group()
            for lines in self.lines:
                lines.drain()

    @property
    def failure(self) -> Failure | None:
        """How it failed by itself; None while it has not, and when it was ended by the launcher."""
        asked, tail = self._asked_to_end_at, "\n".join(self._errors.tail) if not self._draws else None
        if self.told is not None and self.told["code"] != PREEMPTED:
            failure = Failure(rank=self.rank, tail=tail, **self.told)
        elif self.code in (None, 0, PREEMPTED):
            return None
        else:
            failure = Failure(rank=self.rank, at=self._ended_at, code=self.code, tail=tail)
        return failure if asked is None or failure.at < asked else None

    @property
    def stop(self) -> dict[str, Any] | None:
        """What it told where it stopped as somebody asked it to; the launcher, after a failure, does not count."""
        asked, told = self._asked_to_end_at, self.told
        if told is None or told["code"] != PREEMPTED or (asked is not None and told["at"] >= asked):
            return None
        return told

    @property
    def where(self) -> str:
        """Where it hung, as it tells when it is given up; empty where it told nothing of that."""
        return str(self.told["where"]) if self.told else ""

    @property
    def stopped_process(self) -> int | None:
        """The id of its process, where somebody has stopped that (SIGSTOP, a debugger); on Linux."""
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return None
        return self._process.pid if state in "Tt" and self.code is None else None

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self.code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Ask it to end, because another rank failed; one that has told of its own failure is ending."""
        if self._asked_to_end_at is None:
            self._asked_to_end_at = time.monotonic()
            if self.told is None:
                self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with what it started; ``look`` sees that it is gone."""
        if self.code is None:
            self._asked_to_end_at = self._asked_to_end_at or time.monotonic()
            self._kill_group()

    def close(self) -> None:
        """Make sure that it is gone, and let go of its pipes."""
        self.kill()
        self._process.wait()
        self.look()
        for lines in self.lines:
            lines.close()

    def hold_errors(self) -> None:
        """From now on keep its standard error back."""
        self._errors.hold()

    def show_errors(self) -> None:
        """Show what was kept back."""
        self._errors.release()

    def _hear(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # a line that its end cut in two
            report = json.loads(line)
            if self.told is None and isinstance(report, dict) and report.keys() == REPORT:
                self.told = report
            if isinstance(report, dict) and report.keys() == {"collectives"}:
                self.collectives = self.collectives or report["collectives"]

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
