"""Figures of several cells: the middle, and how far they lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Figures of several cells, at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0) -> Spread | None:
        """The numbers under ``key``, times ``scale``; records without one are left out. None of none."""
        found = tuple(scale * float(each[key]) for each in records if each.get(key) is not None)
        return cls(found) if found else None

    @property
    def median(self) -> float:
        """The middle; NaN where a value is."""
        return math.nan if any(map(math.isnan, self.values)) else statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    @property
    def n(self) -> int:
        """Number of cells."""
        return len(self.values)
