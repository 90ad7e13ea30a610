"""The largest micro-batch that a GPU holds: a few sizes are traced, and what lies between them is guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.contract.records import MemoryPlan

MOST_TRACES: Final = 7
"""Sizes that are looked at, of which each takes seconds; four or five are enough for nearly all models."""

CLOSE: Final = 0.9
"""What fits, over what may fit at the most, at which the search ends: the last samples are not worth a trace."""


@dataclass(frozen=True, kw_only=True)
class LargestMicroBatch:
    """What the search ended with. Every size in it was traced."""

    samples: int
    """The largest that fits; 0: not even the smallest does."""
    too_large: int | None
    """The smallest that does not fit; None: the whole batch fits, or every size that was tried is refused."""
    plan: MemoryPlan | None
    """The prediction for ``samples``; None where nothing fits."""


def usable_bytes(capacity: int) -> int:
    """What a prediction may come to on a GPU of so much memory.

    CUDA gives programs 0.5 to 2 % less than nvidia-smi reports, see ``gpus``; and up to 2 % may be missing in the
    prediction, see benchmarks/README.md.
    """
    return capacity * 98 // 102


def largest_micro_batch(
    plan_of: Callable[[int], MemoryPlan | None], *, start: int, most: int, limit_bytes: int
) -> LargestMicroBatch:
    """The largest micro-batch whose ``total`` is at most ``limit_bytes``.

    Memory is nearly a straight line over the size, once activations are most of it: two sizes give its slope, and say
    where it meets the limit. A guess counts for nothing until it was traced; the search ends when the next size does
    not fit, or hardly more can.

    Args:
        plan_of: the plan of a run with micro-batches of so many samples; its total does not fall when they grow, unless
            from several micro-batches to the whole batch in one. None where such a run is refused, as batch
            normalisation may refuse a sample by itself.
        start: the size to begin with.
        most: the size to end with, the whole batch.
        limit_bytes: what the GPU can hold.

    Raises:
        ValueError: ``start`` is not between 1 and ``most``.
    """
    if not 1 <= start <= most:
        raise ValueError(f"start {start} is not between 1 and {most}")
    traced: dict[int, MemoryPlan | None] = {}
    size = start
    while True:
        traced[size] = plan_of(size)
        totals = {n: plan.total for n, plan in traced.items() if plan is not None}
        too_large = min((n for n, total in totals.items() if total > limit_bytes), default=None)
        fits = max((n for n in totals if too_large is None or n < too_large), default=0)
        left = [n for n in range(fits + 1, most + 1 if too_large is None else too_large) if n not in traced]
        close = too_large is not None and fits >= CLOSE * (too_large - 1)
        if not left or close or len(traced) == MOST_TRACES:
            return LargestMicroBatch(samples=fits, too_large=too_large, plan=traced.get(fits))
        # accumulated gradients and their graphs are a step in the line: the whole batch is no guide to the others
        above = sorted(n for n, total in totals.items() if total > limit_bytes and n < most)
        wanted = _guess(totals, above, fits, too_large, limit_bytes, sorted(traced)) if too_large else most
        size = min(left, key=lambda n: abs(n - wanted))


def _guess(
    totals: Mapping[int, int], above: Sequence[int], fits: int, too_large: int, limit_bytes: int, traced: Sequence[int]
) -> int:
    """Where the limit is likely to be met.

    Small sizes may all take the same, where the peak is not in their steps: so the slope is rather that of sizes which
    are too large, and a line that leads nowhere gives way to the middle.
    """
    if fits == 0 and len(traced) == MOST_TRACES - 1:
        return 1  # that nothing fits is a claim about the smallest
    if len(above) > 1:
        guess = max(_crossing(totals, above[0], above[1], limit_bytes), 1)
        if guess > fits:
            return guess
    if fits == 0:
        return traced[0] // 2  # the smallest may be one that was refused
    guess = _crossing(totals, fits, too_large, limit_bytes)
    # a guess that hardly moves is most often right the first time, and no guide from then on
    moves = guess > fits + (too_large - fits) // 8
    return guess if moves or len(totals) < 4 else (fits + too_large) // 2


def _crossing(totals: Mapping[int, int], first: int, second: int, limit_bytes: int) -> int:
    """The last size before the line through two sizes passes the limit; 0 where it does not rise."""
    rise = totals[second] - totals[first]
    return first + (second - first) * (limit_bytes - totals[first]) // rise if rise > 0 else 0
