"""Seconds of the host by span: how long, how often, and how much of it was its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from paceline.contract.spans import Sink


@dataclass
class Timing:
    """What all spans of one name add up to."""

    count: int = 0
    seconds: float = 0.0
    own: float = 0.0
    """Without the spans inside them."""


@dataclass
class _Open:
    began: float
    inside: float = 0.0
    """Seconds of the spans within it that have ended."""


@dataclass
class _Thread(threading.local):
    spans: list[_Open] = field(default_factory=list)


@final
class Timers(Sink):
    """Adds up spans by name, over all threads.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._thread, self._lock = clock, _Thread(), threading.Lock()
        self._found: dict[str, Timing] = {}

    @property
    def found(self) -> Mapping[str, Timing]:
        """By name, in the order in which names ended first."""
        return self._found

    def begin(self, name: str, step: int | None) -> None:
        self._thread.spans.append(_Open(self._clock()))

    def end(self, name: str) -> None:
        spans = self._thread.spans
        over = spans.pop()
        seconds = self._clock() - over.began
        if spans:
            spans[-1].inside += seconds
        with self._lock:
            timing = self._found.setdefault(name, Timing())
            timing.count += 1
            timing.seconds += seconds
            timing.own += seconds - over.inside

    def mark(self, name: str, step: int | None) -> None:
        pass
