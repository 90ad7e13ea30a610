"""Start ranks and stand by them: what they say is passed on, what we are sent is too, and they end together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import cast, final

from paceline.contract.errors import INTERRUPTED, UserError
from paceline.contract.last_resort import GIVE_UP_SECONDS
from paceline.contract.stop import Stop
from paceline.distributed.sockets import listen
from paceline.verbs.launch.causes import PREEMPTED, Failure, blamed, described, first_cause
from paceline.verbs.launch.collectives import differences
from paceline.verbs.launch.process import RankProcess
from paceline.verbs.launch.ranks import Ranks
from paceline.verbs.launch.screen import Screen

SETTLE_SECONDS = 1.0
"""How long the others are heard after a rank has failed. One that lost a connection may speak before the one that took
it down; and what all ranks find is said once, as no matter of one rank."""

GRACE_SECONDS = 5.0
"""How long ranks have to end after SIGTERM; then comes SIGKILL. A rank that hangs in a collective needs it."""

LOOK_SECONDS = 0.05


def launch(
    command: Sequence[str],
    ranks: Ranks,
    *,
    port: int = 0,
    grace_seconds: float = GRACE_SECONDS,
    makes_run: bool = False,
) -> int:
    """Run a command as the ranks of this machine, and return when all of them have ended.

    When one fails, the others are ended: none is left ``SETTLE_SECONDS + grace_seconds`` later, or, where the others
    waited in vain for one that still runs, as long as that takes to give itself up and say where it hangs. The rank
    that failed first is named on standard error, with its message, once. The signals of ``Stop`` are passed on; a
    second Ctrl-C kills. On Linux no rank outlives this process, however that ends.

    Args:
        command: program and arguments; each rank runs it with torchrun's environment variables.
        ranks: how many, and where.
        port: of the ranks' store, which listens on the loopback address alone; 0: any that is free. The socket is
            opened here and rank 0 inherits it, so that no other process can take the port in between.
        grace_seconds: from SIGTERM to SIGKILL.
        makes_run: the command ends with 75 when it is asked to stop; a rank that has not yet begun to listen does not.

    Returns:
        0 when all succeed; 75 when they were preempted; else the exit code of the rank that failed first: 2 for a
        user's error, 128 + n after signal n.

    Raises:
        UserError: there is no such program, the port is in use, or the system has no room for so many processes.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: no such program", fix="a program of the PATH, or the path of one")
    # of several machines each line says whose it is; rank 0 alone draws, and needs no name
    host = _node() if ranks.meet_at else ""
    out, err = Screen(sys.stdout), Screen(sys.stderr)
    started: list[RankProcess] = []
    with contextlib.ExitStack() as stack:
        # the store of several machines is opened by rank 0 itself, where they meet
        store = None if ranks.meet_at else stack.enter_context(listen(port))
        noted = stack.enter_context(_noted_signals())
        port = port if store is None else store.getsockname()[1]
        try:
            for local_rank in range(ranks.count):
                rank, variables = ranks.first + local_rank, ranks.environment(os.environ, local_rank, port)
                inherited = None if local_rank else store
                try:
                    name, draws = f"[{host} rank {rank}]" if host else f"[rank {rank}]", rank == 0
                    process = RankProcess(rank, command, variables, inherited, out, err, name=name, draws=draws)
                    started.append(process)
                except OSError as error:
                    what = f"rank {rank} of {ranks.total}: cannot be started: {error.strerror}"
                    raise UserError(what, fix="fewer processes") from None
                # rank 0 alone holds it: where that has died the others are turned away, not kept waiting
                if store is not None:
                    store.close()
            place = f"[{host}] " * bool(ranks.first)
            return _Supervision(started, ranks.total, place, noted, err, grace_seconds, makes_run).run()
        finally:
            for process in started:
                process.close()


@final
class _Supervision:
    """From the start of the ranks to their end."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        total: int,
        host: str,
        noted: deque[int],
        err: Screen,
        grace_seconds: float,
        makes_run: bool,
    ) -> None:
        self._makes_run = makes_run
        self._ranks, self._total, self._host = ranks, total, host
        self._noted, self._err, self._grace_seconds = noted, err, grace_seconds
        self._passed_on: set[int] = set()
        self._is_interrupted = False
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._cause: Failure | None = None

    def run(self) -> int:
        """Stand by until all have ended; returns the exit code."""
        while any(rank.code is None for rank in self._ranks):
            pipes = {lines.fileno(): lines for rank in self._ranks for lines in rank.lines if lines.is_open}
            for ready in wait(list(pipes), LOOK_SECONDS):
                pipes[cast(int, ready)].read()
            for rank in self._ranks:
                rank.look()
            self._pass_on_signals()
            if any(rank.code == PREEMPTED for rank in self._ranks):
                self._stop_together(time.monotonic())
            if self._failures() and not self._is_interrupted:
                self._end_together(time.monotonic())
        if self._is_interrupted:
            return INTERRUPTED
        if self._failures() and not self._is_stop:
            cause = self._explained()
            for rank in self._ranks:
                if rank.rank in cause.lost and rank.where:
                    self._err.say(f"{self._host}paceline: rank {rank.rank} hung\n  where: {rank.where}")
            if cause.doubt == 2:
                for text in differences({rank.rank: rank.collectives for rank in self._ranks}):
                    self._err.say(f"{self._host}paceline: {text}")
            # a rank that has not yet begun to listen ends by the signal itself
            is_early = cause.code - 128 in self._passed_on and not cause.is_bug
            return PREEMPTED if is_early and self._makes_run else cause.code
        if told := [rank.stop for rank in self._ranks if rank.stop]:
            self._err.say(f"{self._host}paceline: {min(told, key=lambda report: report['at'])['message']}")
        return PREEMPTED if told or any(rank.code == PREEMPTED for rank in self._ranks) else 0

    def _failures(self) -> list[Failure]:
        return [failure for rank in self._ranks if (failure := rank.failure)]

    @property
    def _is_stop(self) -> bool:
        """Whether a rank was stopped as asked without waiting for the others, and they failed of that alone."""
        return any(rank.stop for rank in self._ranks) and all(failure.doubt == 2 for failure in self._failures())

    def _pass_on_signals(self) -> None:
        while self._noted:
            number = self._noted.popleft()
            self._is_interrupted |= number == signal.SIGINT and number in self._passed_on
            self._passed_on.add(number)
            for rank in self._ranks:
                if self._is_interrupted:
                    rank.kill()
                else:
                    rank.send(number)
            if self._is_interrupted:
                self._err.say(f"{self._host}paceline: interrupted")

    def _stop_together(self, now: float) -> None:
        """Ask the others to stop, for one has stopped; those that have not met it yet would wait for the time-out."""
        if self._stopped_at is None:
            self._stopped_at = now
        if now >= self._stopped_at + SETTLE_SECONDS and signal.SIGTERM not in self._passed_on:
            self._noted.append(signal.SIGTERM)

    def _end_together(self, now: float) -> None:
        """One has failed: hear what the others have to say, which tells the cause; then end them."""
        if self._failed_at is None:
            self._failed_at = now
            for rank in self._ranks:
                rank.hold_errors()
        if now >= self._failed_at + SETTLE_SECONDS:
            lost = self._explained().lost
            for rank in self._ranks:
                rank.end()
            # one that others waited for in vain says where it hangs when it is given up
            hangs = any(rank.rank in lost and rank.code is None and not rank.stopped_process for rank in self._ranks)
            grace = max(self._grace_seconds, GIVE_UP_SECONDS + 1) if hangs else self._grace_seconds
            if now >= self._failed_at + SETTLE_SECONDS + grace:
                for rank in self._ranks:
                    rank.kill()

    def _explained(self) -> Failure:
        """The cause; what there is to say of it is said once."""
        if self._cause is None:
            failures = self._failures()
            stopped = {rank.rank: found for rank in self._ranks if (found := rank.stopped_process)}
            self._cause = blamed(first_cause(failures), stopped)
            if self._is_stop:  # which is told at the end
                return self._cause
            next(rank for rank in self._ranks if rank.rank == self._cause.rank).show_errors()
            self._err.say(self._host + described(self._cause, failures, self._total, self._passed_on))
        return self._cause


def _node() -> str:
    """This machine's name: Slurm's, which its other commands know, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@contextlib.contextmanager
def _noted_signals() -> Iterator[deque[int]]:
    """Inside, signals are put down in what is yielded, in place of what they did before.

    One that this process was started to ignore stays ignored, as the ranks inherit it; and outside the main thread,
    where Python takes no signals, none is noted.
    """
    noted: deque[int] = deque()
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in Stop.SIGNALS if is_main}
    # None: a handler that is not Python's, which could not be put back
    taken = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    outer = Stop.current()
    for number in taken:
        signal.signal(number, lambda received, _: noted.append(received))
    try:
        # the ranks may take their time to save, and have a last resort each
        with outer.noted() if outer else contextlib.nullcontext():
            yield noted
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
