"""The signals that ask a run to stop; apart from what answers them, for that is not loaded yet when the first comes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""What schedulers send before they kill, a person's Ctrl-C, and a terminal that is lost."""


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """A process that is started inside, by this thread, gets none of these signals; SIGKILL still ends it.

    A terminal sends a signal to every process of a group, and Slurm to all of a job. torch does not notice that one
    which compiles for it has died, and waits for ever. A blocked signal stays blocked through fork and exec; meanwhile
    this process's own are answered in its other threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
