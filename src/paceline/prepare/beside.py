"""Threads for what needs no Python, beside the thread that prepares a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, final

from paceline.contract.stopwatch import Stopwatch
from paceline.data.encode import KeepGoing

Result = TypeVar("Result")


@final
class Beside:
    """Threads for work beside the main thread's; on the way out it has ended, or been broken off where that failed."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch, self._broken_off = watch, threading.Event()
        self._threads = ThreadPoolExecutor(2, "paceline-prepare")

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._broken_off.set()
        self._threads.shutdown(wait=True, cancel_futures=kind is not None)

    def start(self, phase: str, work: Callable[[KeepGoing], Result]) -> Future[Result]:
        """Begin ``work``; it is given what to call from time to time, and counted as overlapped ``phase``."""

        def timed() -> Result:
            with self._watch.phase(phase):
                return work(self._keep_going)

        return self._threads.submit(timed)

    def _keep_going(self) -> None:
        if self._broken_off.is_set():
            raise _BrokenOff


class _BrokenOff(Exception):
    """The main thread has failed, so nobody waits for this work; its future is not looked at."""
