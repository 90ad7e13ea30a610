"""Which rank failed first, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from paceline.contract.errors import Preempted, UserError
from paceline.distributed.failures import LOST_CONNECTION

PREEMPTED: Final = Preempted.exit_code


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed: what it told the launcher, or how its process ended."""

    rank: int
    at: float
    """On the clock of ``time.monotonic``, which all processes of a machine share."""
    code: int
    """Exit code, as shells count: 128 + n when it was ended by signal n."""
    message: str = ""
    """What it told; empty: it told nothing."""
    is_bug: bool = False
    """Whether the message is a traceback."""
    lost: Sequence[int] = ()
    """Ranks that it found gone."""
    where: str = ""
    """The lines that it hung at, where it was given up."""
    is_own: bool = False
    """Whether the others cannot have found the same: this rank's device was full."""
    tail: str | None = None
    """The last of its standard error; None: that went straight to the terminal."""

    @property
    def doubt(self) -> int:
        """0: a cause of its own; 1: that is not known; 2: it lost other ranks, or the connection to them."""
        if self.lost or LOST_CONNECTION.search(self.message or self.tail or ""):
            return 2
        # an abort is how NCCL's watchdog ends a process, too
        ended_itself = self.code < 128 or self.code == 128 + signal.SIGABRT
        return int(not self.message and self.tail is None and ended_itself)


def first_cause(failures: Collection[Failure]) -> Failure:
    """The one that the others follow from: the earliest of those with the least doubt."""
    return min(failures, key=lambda failure: (failure.doubt, failure.at))


def blamed(cause: Failure, stopped: Mapping[int, int]) -> Failure:
    """The cause; or, where that is a rank that was waited for in vain, the first one whose process is stopped.

    Args:
        stopped: process ids of ranks that are neither running nor gone.
    """
    if cause.doubt < 2 or not stopped:
        return cause
    rank = min(stopped)
    hangs = UserError(
        f"rank {rank} hangs: its process {stopped[rank]} is stopped (SIGSTOP, or a debugger)",
        f"the others waited for it: {cause.message.splitlines()[0] if cause.message else f'rank {cause.rank}'}",
        "do not stop one rank alone: SIGSTOP to all of them, or to none; --resume goes on from the last checkpoint",
    )
    return replace(cause, rank=rank, message=str(hangs), is_bug=False, code=hangs.exit_code)


def described(cause: Failure, failures: Sequence[Failure], num_ranks: int, passed_on: Collection[int]) -> str:
    """The message of a failed launch.

    Args:
        cause: the first.
        failures: all of them.
        num_ranks: of the launch.
        passed_on: signals that the launcher was sent and passed on.
    """
    number = cause.code - 128
    if number in passed_on and not cause.is_bug:
        return f"paceline: stopped by {signal.Signals(number).name}"
    failed = f"rank {cause.rank} failed first" if num_ranks > 1 else "rank 0 failed"
    others = "; the others were ended" if num_ranks > 1 else ""
    if cause.is_bug:
        return f"{cause.message}\npaceline: {failed}{others}"
    if cause.message:
        # what all ranks find, or the first says for all, is no matter of one rank
        is_common = (
            (cause.rank == 0 and not (cause.is_own and num_ranks > 1))
            or cause.message.startswith(f"rank {cause.rank} ")
            or any(f.message == cause.message and f.rank != cause.rank for f in failures)
        )
        return f"paceline: {cause.message}" if is_common else f"paceline: rank {cause.rank}: {cause.message}"
    return f"paceline: {failed}: {_ending(cause.code)}{others}"


def _ending(code: int) -> str:
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    return f"ended by {name}" + (" (the kernel sends it when memory runs out)" if name == "SIGKILL" else "")
