"""Rows as a source gives them, validated but not yet encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.dataset import Origins, Tokens


@dataclass(frozen=True, kw_only=True)
class Table:
    """Validated rows in source order; exactly one of ``texts``, ``images`` and ``tokens`` is given."""

    texts: Sequence[str] | None = None
    pairs: Sequence[str] | None = None
    """Second text of each row, for pairs."""
    images: NDArray[np.uint8] | None = None
    """[n, height, width, channels]."""
    tokens: Tokens | None = None
    labels: Sequence[str] | Sequence[float] | Sequence[tuple[str, ...]] | None = None
    """As written in the source: names, numbers for regression, tuples of names for multi-label; None: unlabelled."""
    kind: str | None = None
    """Name of the task; None when unlabelled."""
    splits: Sequence[str] | None = None
    """``train``, ``validation`` or ``test`` for each row; None when the source names none."""
    origins: Origins
    rows: Sequence[Mapping[str, Any]] | None = None
    """The original rows, kept only where they are written out again (predict)."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> column name, as given or guessed."""
    names_files: bool = False
    """Whether images are in files that the rows name, so that the source's own files do not say if they changed."""
    notices: tuple[str, ...] = ()
    """Guesses and warnings that the user should read."""

    def __len__(self) -> int:
        return len(self.origins.lines)
