"""The signals that ask a run to stop. Little is imported here: until they are listened to, they end the process."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""What schedulers send before they kill, a person's Ctrl-C, and a terminal that is lost."""

STOPPED_FILE = "PACELINE_STOPPED_FILE"
"""Variable: a file in which each process of a run that ends by a signal leaves a line, ``stopped by SIGUSR2``. A script
learns from it which signal that was, also where there is no run folder yet."""


def leave_word(number: signal.Signals) -> None:
    """Write into the file that the variable names, if it names one; what cannot be written is left."""
    path = os.environ.get(STOPPED_FILE)
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, f"stopped by {number.name}\n".encode())
        os.close(file)
    except OSError:
        pass  # the exit code says that it was stopped


class DeafChildren:
    """While entered, a process that this thread starts gets none of these signals; SIGKILL still ends it.

    A terminal sends a signal to every process of a group, and Slurm to all of a job. torch does not notice that one
    which compiles for it has died, and waits for ever. A blocked signal stays blocked through fork and exec; meanwhile
    this process's own are answered in its other threads.
    """

    def __enter__(self) -> Self:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *error: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
