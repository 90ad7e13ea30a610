"""The signals that ask a run to stop. Little is imported here: until they are listened to, they end the process."""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""What schedulers send before they kill, a person's Ctrl-C, and a terminal that is lost."""


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
