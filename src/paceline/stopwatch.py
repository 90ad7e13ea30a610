"""Where the seconds of a run go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

DERIVED = ("other", "total")
"""Not phases: what is left over, and the sum."""


class Stopwatch:
    """Adds up wall seconds by phase; a phase inside another is taken out of the outer one."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._earlier = 0.0
        self._inner = [0.0]

    def add(self, earlier: Mapping[str, float]) -> None:
        """Count in what ``seconds`` gave before a resume."""
        self._earlier += earlier["total"]
        for name, value in earlier.items():
            if name not in DERIVED:
                self._seconds[name] = self._seconds.get(name, 0.0) + value

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as ``name``."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - started
            own = whole - self._inner.pop()
            self._inner[-1] += whole
            self._seconds[name] = self._seconds.get(name, 0.0) + own

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, ``other`` for what no phase counted, and their ``total``."""
        total = self._earlier + time.perf_counter() - self._started
        return {**self._seconds, "other": max(0.0, total - sum(self._seconds.values())), "total": total}
