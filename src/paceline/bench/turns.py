"""Who is measured when: a machine that grows hot or busy treats all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[T, int]]:
    """Each item once a round, with the round's number; each round begins with another, the first with the first."""
    for number in range(rounds):
        start = number % len(items) if items else 0
        yield from ((item, number) for item in (*items[start:], *items[:start]))
