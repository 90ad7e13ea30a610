"""The end of a process that was asked to stop and does not: what is under way may hang, or be deaf to signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, final

GIVE_UP_SECONDS: Final = 6.0
"""How long work that loses nothing may go on after a signal: Kubernetes and Slurm kill 30 s after theirs."""

EXIT_SECONDS: Final = 3.0
"""How long Python may take to end: threads that cannot be interrupted are waited for, as those of a download."""

WORDS_SECONDS: Final = 1.0
"""How long it may take to say so: the disk that is looked at may be what hangs."""

LOOK_SECONDS = 0.1

IN_TORCH: Final = "paceline-torch-"
"""How names of threads begin that wait in torch's C++: one that comes back while Python ends aborts the process."""

CLOSED: Final = 0
"""In the pipe: nothing is watched any more; no signal has this number."""

Seconds = Callable[[], float]


@final
class LastResort:
    """A thread that ends the process when a signal has asked it to stop, and what is under way lasts for too long.

    Python runs a handler in the main thread, between two of its instructions. A library that waits in C never comes to
    one, and may even swallow what a handler raises. The interpreter also writes each signal's number into a pipe at
    once, and this thread reads that.

    Args:
        numbers: the signals that ask; only those with a handler of Python's are seen.
        end: is given the signal and what a person does then, tells of it, and returns the exit code.
    """

    def __init__(self, numbers: Collection[signal.Signals], end: Callable[[signal.Signals, str], int]) -> None:
        self.end = end
        """Tells of the end, and says the exit code."""
        self._numbers = frozenset(numbers)
        self._asked: tuple[signal.Signals, float] | None = None
        self._since = 0.0
        self._seconds: Seconds | None = lambda: GIVE_UP_SECONDS
        self._words: Callable[[], str] = str
        self._process = os.getpid()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        # a child that is forked has the same pipe, and its signals are its own
        os.register_at_fork(after_in_child=self._let_go)
        self._thread = threading.Thread(target=self._watch, name="paceline-last-resort", daemon=True)
        self._thread.start()

    @property
    def asked_by(self) -> signal.Signals | None:
        """The signal that asked first."""
        return self._asked[0] if self._asked else None

    def asked(self, number: int) -> None:
        """A signal has asked, before this was there."""
        os.write(self._writing, bytes([number]))

    def allow(self, seconds: Seconds | None, words: Callable[[], str]) -> tuple[Seconds | None, Callable[[], str]]:
        """From now on what is under way may last so long after the signal, and after this call.

        Args:
            seconds: None: as long as it takes.
            words: what a person does once it was given up.

        Returns:
            The two as they were.
        """
        before = self._seconds, self._words
        self._since, self._seconds, self._words = time.monotonic(), seconds, words
        return before

    def close(self) -> None:
        """Nothing is ended any more."""
        if self._is_in_child():
            return  # a forked child has no thread, and the pipe is its parent's too
        signal.set_wakeup_fd(self._before)
        # not by closing the pipe: a forked child may hold it open for long
        os.write(self._writing, bytes([CLOSED]))
        self._thread.join()
        os.close(self._writing)
        os.close(self._reading)

    def _is_in_child(self) -> bool:
        return os.getpid() != self._process

    def _watch(self) -> None:
        while True:
            if select.select([self._reading], [], [], LOOK_SECONDS if self._asked else None)[0]:
                numbers = os.read(self._reading, 64)
                if CLOSED in numbers:
                    return
                found = [number for number in numbers if number in self._numbers]
                if found and self._asked is None:
                    self._asked = signal.Signals(found[0]), time.monotonic()
            if self._asked is not None:
                number, at = self._asked
                seconds = self._seconds
                if seconds is not None and time.monotonic() - max(at, self._since) > seconds():
                    self._give_up(number)

    def _give_up(self, number: signal.Signals) -> None:
        codes = [128 + number]

        def tell() -> None:
            codes.append(self.end(number, self._words()))

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(WORDS_SECONDS)
        os._exit(codes[-1])

    def _let_go(self) -> None:
        if self._is_in_child():
            with contextlib.suppress(ValueError, OSError):
                signal.set_wakeup_fd(-1)
