"""Exclusive use of what a process has once for all its threads: torch's generator and its numeric settings.

Dropout and random weights are drawn from torch's own generator, so that two trainings in threads would draw each
other's numbers. An evaluation draws none that matter, but puts generator and settings back as it found them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from paceline.contract.errors import UserError

_POLL_SECONDS = 0.05

_lock = threading.RLock()
_trains: threading.Thread | None = None
"""The thread that trains."""


@contextlib.contextmanager
def exclusive(verb: str, *, trains: bool) -> Iterator[None]:
    """Keep trainings, evaluations and predictions of other threads out while the block runs.

    Evaluations and predictions of other threads are waited for. The thread that is inside may come in again.

    Args:
        verb: named in the error.
        trains: whether the block may run for hours, so that others are refused in place of waiting.

    Raises:
        UserError: another thread trains.
    """
    global _trains
    while not _lock.acquire(timeout=_POLL_SECONDS):
        refuse_beside_training(verb)
    before = _trains
    _trains = threading.current_thread() if trains else before
    try:
        yield
    finally:
        _trains = before
        _lock.release()


def refuse_beside_training(verb: str) -> None:
    """Refuse to draw random numbers while another thread of this process trains.

    Raises:
        UserError: names the thread and what to do.
    """
    other, this = _trains, threading.current_thread()
    if other is None or other is this:
        return
    raise UserError(
        f"{verb} in thread {this.name!r}: thread {other.name!r} of this process trains",
        "both draw from torch's one generator, so that the numbers of each would depend on the other",
        "start it in a process of its own, or after the training; a search in threads (n_jobs=2) becomes n_jobs=1, or"
        " several processes with one storage",
    )


def _release_in_child() -> None:
    """Forget the threads of the parent process, none of which is in a forked child."""
    global _lock, _trains
    _lock, _trains = threading.RLock(), None


os.register_at_fork(after_in_child=_release_in_child)
