"""Bytes of a GPU by span: how far its memory rose in each, and what each left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from paceline.contract.spans import Sink


@dataclass
class Phase:
    """What was seen in all spans of one name; bytes that torch's allocator had given out."""

    count: int = 0
    peak: int = 0
    """The most at any moment of one of them."""
    left: int = 0
    """What was there at their ends and not at their beginnings, added up."""


@dataclass(kw_only=True)
class _Open:
    began: int
    peak: int


@dataclass
class _Thread(threading.local):
    spans: list[_Open] = field(default_factory=list)


def _of_gpu() -> tuple[int, int]:
    if not torch.cuda.is_initialized():  # nothing was taken yet, and torch refuses to count anew
        return 0, 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), peak


@final
class MemoryPhases(Sink):
    """Follows a GPU's memory from span to span; the device is not waited for.

    torch counts its peak anew at each span's beginning and end: whoever else asks for it meanwhile is told less.

    Args:
        read: bytes now, and the most since it was called last; by default those of the current GPU.
    """

    def __init__(self, read: Callable[[], tuple[int, int]] = _of_gpu) -> None:
        self._read, self._thread, self._lock = read, _Thread(), threading.Lock()
        self._found: dict[str, Phase] = {}
        self._open: list[_Open] = []
        """The spans that are open now, of all threads: they share the GPU."""

    @property
    def found(self) -> Mapping[str, Phase]:
        """By name, in the order in which names ended first."""
        return self._found

    def begin(self, name: str, step: int | None) -> None:
        with self._lock:
            now = self._now()
            begun = _Open(began=now, peak=now)
            self._open.append(begun)
        self._thread.spans.append(begun)

    def end(self, name: str) -> None:
        over = self._thread.spans.pop()
        with self._lock:
            left = self._now() - over.began
            self._open = [one for one in self._open if one is not over]
            phase = self._found.setdefault(name, Phase())
            phase.count += 1
            phase.peak = max(phase.peak, over.peak)
            phase.left += left

    def mark(self, name: str, step: int | None) -> None:
        pass

    def _now(self) -> int:
        """Bytes now; what is open by now has seen the peak since the last reading."""
        now, peak = self._read()
        for one in self._open:
            one.peak = max(one.peak, peak)
        return now
