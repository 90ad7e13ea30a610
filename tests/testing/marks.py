"""Which cases of a test are slow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Hashable], *fast: Hashable) -> list[Any]:
    """Mark all of these cases slow but ``fast``.

    Raises:
        ValueError: a fast one is not among them.
    """
    cases = list(values)
    if missing := set(fast) - set(cases):
        raise ValueError(f"no cases: {missing}")
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
