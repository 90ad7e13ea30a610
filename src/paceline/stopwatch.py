"""Where the seconds of a run go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Adds up wall seconds by phase; a phase inside another is taken out of the outer one.

    Args:
        earlier: seconds by phase of the part of the run before a resume.
    """

    def __init__(self, earlier: dict[str, float] | None = None) -> None:
        self._started = time.perf_counter()
        self._seconds = dict(earlier or {})
        self._earlier = sum((earlier or {}).values())
        self._inner = [0.0]

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
        counted = {name: value for name, value in self._seconds.items() if name not in ("other", "total")}
        return {**counted, "other": max(0.0, total - sum(counted.values())), "total": total}
