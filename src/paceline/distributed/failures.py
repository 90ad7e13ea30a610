"""What a rank that fails says, and to whom: our launcher, which prints the first cause once, or the person."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Iterator

from paceline.contract.errors import INTERRUPTED, MemoryFullError, PacelineError, Preempted, UserError
from paceline.contract.streams import write_error
from paceline.distributed.recorder import recorded
from paceline.machine.cluster import LAUNCHER, find_place

REPORT_FD = "PACELINE_REPORT_FD"
"""Variable of each rank: the descriptor on which the launcher is told of its failure."""

REPORT_CHARACTERS = 10_000
"""No message to the launcher is longer. Six bytes a character at most, it fits into a pipe: telling never waits."""

PIPE_BYTES = 2**16
"""What a pipe takes while nobody reads."""

LOST_CONNECTION = re.compile(
    r"connection (was |has been )?(closed|reset|refused|aborted)|broken pipe|socket closed|(read|write) error \[|"
    r"connectFullMesh|recvValue|recvBytes|sendBytes|failed to recv|DistNetworkError|DistStoreError|"
    r"ncclRemoteError|remote process (has )?(exited|crashed)|communicator was aborted|watchdog caught collective|"
    r"timed out (after )?waiting",
    re.IGNORECASE,
)
"""How gloo, NCCL and torch's stores put it that another rank is gone."""

REPEAT_SECONDS = 5.0
"""How long a rank of torchrun's waits before it says what the first rank of its machine may be saying: torchrun ends it
as soon as that one has ended, so that what all ranks find is said once."""


@contextlib.contextmanager
def failures_told(rank: int | None = None) -> Iterator[None]:
    """Inside, an error is handed to our launcher, which prints the cause once; the process ends with its exit code.

    Without our launcher it passes through, where this process is the first rank or none. Another rank prints what a
    person can change with its number in front.

    Args:
        rank: of this process, where the environment does not say it.

    Raises:
        SystemExit: the error was told.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not tell_launcher(error) and not _told_by_rank(error, rank):
            raise
        raise SystemExit(_exit_code(error)) from None


def tell_launcher(error: BaseException, where: str = "") -> bool:
    """Tell our launcher that this rank fails, as early as possible; of a rank it believes the first telling.

    Whoever takes connections down on an error calls this before: what the others then run into is a consequence. The
    last collectives of this rank follow.

    Args:
        error: what this rank fails of.
        where: the innermost calls, of a rank that hung and was given up.

    Returns:
        Whether there is a launcher that was told.
    """
    # what is no Exception is no failure: Python's or our own way up and out, after a signal for one
    # descendants of a rank inherit the variables, but neither the parent nor the descriptor
    if not isinstance(error, Exception | KeyboardInterrupt) or os.environ.get(LAUNCHER) != str(os.getppid()):
        return False
    is_bug = not isinstance(error, PacelineError | KeyboardInterrupt)
    text = "".join(traceback.format_exception(error)).rstrip() if is_bug else str(error) or "interrupted"
    # the end of a traceback says most
    text = text[-REPORT_CHARACTERS:] if is_bug else text[:REPORT_CHARACTERS]
    # an error that names the ranks it lost is a consequence of what happened to them
    lost = list(getattr(error, "ranks", ()))
    report = {"at": time.monotonic(), "code": _exit_code(error), "is_bug": is_bug, "message": text, "lost": lost}
    report |= {"where": where, "is_own": isinstance(error, MemoryFullError)}
    try:
        written = os.write(int(os.environ[REPORT_FD]), json.dumps(report).encode() + b"\n")
    except (KeyError, ValueError, OSError):
        return False
    # after what counts: torch's recorder may wait for a GPU that hangs, and its format is torch's own
    with contextlib.suppress(Exception):
        last = json.dumps({"collectives": found}).encode() + b"\n" if (found := recorded()) else b""
        if written + len(last) <= PIPE_BYTES:
            os.write(int(os.environ[REPORT_FD]), last)
    return True


def _told_by_rank(error: BaseException, rank: int | None) -> bool:
    if not isinstance(error, PacelineError):
        return False
    try:
        place = find_place(os.environ)
    except UserError:
        return False
    number = place.rank if rank is None else rank
    if number == 0:
        return False
    if place.started == "torchrun" and place.local_rank > 0:
        if isinstance(error, Preempted):
            # a stop of one is a stop of all, of which the first one tells; it may also be how torchrun ends this one
            return True
        time.sleep(REPEAT_SECONDS)
    write_error(f"paceline: rank {number}: {error}")
    return True


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, PacelineError) else 1
