"""Where the seconds of a run go, from the start of its process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DERIVED = ("other", "total")
"""Not phases: what is left over, and the sum."""

_LONGEST_START = 600.0
"""Seconds from a process's start to here that are believed; more is a clock that stood still or was set."""

_LOADED = time.perf_counter()


def process_age(process: int | str = "self") -> float | None:
    """Seconds since a process was started, to a hundredth; None where it is not there, or the system does not tell."""
    try:
        # proc(5): starttime is field 22; the name, which may hold blanks and brackets, is field 2
        ticks = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # there is no such clock outside Linux
        return None


def process_start() -> float:
    """When this process began, on the clock of ``time.perf_counter``, to a hundredth of a second.

    For a command, whose process is there for the run alone. Where the system does not tell (it does on Linux), it is
    the moment at which this module was loaded.
    """
    age = process_age()
    if age is None:
        return _LOADED
    now = time.perf_counter()
    return now - age if now - _LOADED <= age < now - _LOADED + _LONGEST_START else _LOADED


@dataclass
class _Thread:
    """What one thread's phases added up to."""

    seconds: dict[str, float] = field(default_factory=dict)
    inner: list[float] = field(default_factory=lambda: [0.0])
    """Seconds that phases inside took, for each open phase; the outermost first."""


class Stopwatch:
    """Adds up wall seconds by phase; a phase inside another is taken out of the outer one.

    The phases of the thread that made the stopwatch are the run's and add up to its total. Those of other threads ran
    beside them: they have a place of their own, ``overlapped``, and count towards no sum.

    Args:
        since: when the run began, on the clock of ``time.perf_counter``; the time from then to now is the phase
            ``start``. None: now.
    """

    def __init__(self, since: float | None = None) -> None:
        now = time.perf_counter()
        self._started = now if since is None else min(since, now)
        self._own = _Thread({} if since is None else {"start": now - self._started})
        self._owns_process = since is not None
        self._beside: dict[int, _Thread] = {}
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._earlier = 0.0
        self._marks: dict[str, float] = {}

    def add(self, earlier: Mapping[str, float]) -> None:
        """Count in what ``seconds`` gave before a resume."""
        self._earlier += earlier["total"]
        for name, value in earlier.items():
            if name not in DERIVED:
                self._own.seconds[name] = self._own.seconds.get(name, 0.0) + value

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        mine = self._mine()
        started = time.perf_counter()
        mine.inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - started
            own = whole - mine.inner.pop()
            mine.inner[-1] += whole
            mine.seconds[name] = mine.seconds.get(name, 0.0) + own

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """The phase ``import``, without Python's collector of cyclic garbage.

        What is imported stays; looking through hundreds of thousands of new objects again and again for some that
        could go takes a fifth of the time of importing torch and transformers. In a process that is there for the run
        alone they are not looked through later either, where it would hold up steps; nor are the frames that are open
        then, so that what they name lives on if they are part of a circle.
        """
        with self._uncollected("import"):
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """The phase ``compile``, likewise.

        Compilers leave as many objects: to look through them takes a third of a second, and a thousand steps of a
        small network take one. What is garbage by then may hold memory of a GPU: it is let go of once, at the end.
        """
        with self._uncollected("compile", last=gc.collect):
            yield

    @contextlib.contextmanager
    def _uncollected(self, name: str, last: Callable[[], object] = lambda: None) -> Iterator[None]:
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self.phase(name):
                try:
                    yield
                finally:
                    if self._owns_process:
                        last()
                        gc.freeze()
        finally:
            if collecting:
                gc.enable()

    def mark(self, name: str) -> None:
        """Remember how long after the start of this process's part of the run something happened for the first time."""
        self._marks.setdefault(name, time.perf_counter() - self._started)

    def marked(self, name: str) -> float | None:
        """Seconds from the start to a ``mark``; None before it."""
        return self._marks.get(name)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, ``other`` for what no phase counted, and their ``total``.

        Phases that are still open count as ``other``.
        """
        total = self._earlier + time.perf_counter() - self._started
        return {**self._own.seconds, "other": max(0.0, total - sum(self._own.seconds.values())), "total": total}

    def overlapped(self) -> dict[str, float]:
        """Seconds by phase that other threads spent beside the run's own phases; they are part of no total."""
        found: dict[str, float] = {}
        with self._lock:
            for thread in self._beside.values():
                for name, value in tuple(thread.seconds.items()):
                    found[name] = found.get(name, 0.0) + value
        return found

    def _mine(self) -> _Thread:
        here = threading.get_ident()
        if here == self._owner:
            return self._own
        with self._lock:
            return self._beside.setdefault(here, _Thread())
