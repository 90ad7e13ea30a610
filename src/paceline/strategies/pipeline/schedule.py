"""In which order a rank of a pipeline makes the forward and backward passes of a step.

Stage ``s`` of the model is chunk ``s // ranks`` of rank ``s % ranks``. A rank sends without waiting, and waits for what
it receives. All ranks make the forward passes of a chunk in one order, and its backward passes in one order, so what
one rank sends to another is received in the order in which it was sent.

Source: GPipe: Huang et al., arXiv 1811.06965. 1F1B: Narayanan et al., PipeDream, SOSP 2019, as it is flushed at every
step in Narayanan et al., Efficient Large-Scale Language Model Training, arXiv 2104.04473, which has ``interleaved``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages that each rank has, by schedule."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of a rank."""

    is_forward: bool
    chunk: int
    microbatch: int


def passes_of(schedule: str, rank: int, ranks: int, count: int) -> list[Pass]:
    """What a rank does in a step, in its order.

    Args:
        schedule: gpipe: all forward passes, then all backward ones; 1f1b: as soon as a backward pass can be made it is,
            so that a rank keeps the activations of ``ranks - rank`` micro-batches at most; interleaved: the same with
            two stages a rank.
        ranks: of the pipeline.
        count: micro-batches of the step.
    """
    chunks = CHUNKS[schedule]
    forward = [Pass(True, chunk, one) for chunk, one in _in_groups(range(chunks), ranks, count)]
    backward = [Pass(False, chunk, one) for chunk, one in _in_groups(reversed(range(chunks)), ranks, count)]
    ahead = min(_ahead(schedule, rank, ranks, count), len(forward))
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += one, other
    return found + backward[len(forward) - ahead :]


def in_flight(schedule: str, rank: int, ranks: int, count: int) -> int:
    """Passes, at most, whose activations a rank keeps at one time."""
    kept = most = 0
    for one in passes_of(schedule, rank, ranks, count):
        kept += 1 if one.is_forward else -1
        most = max(most, kept)
    return most


def bubble(schedule: str, ranks: int, count: int) -> float:
    """Share of a step in which a rank waits, where all stages take equally long and messages no time."""
    chunks = CHUNKS[schedule]
    return (ranks - 1) / (chunks * count + ranks - 1)


def _in_groups(chunks: Iterable[int], ranks: int, count: int) -> list[tuple[int, int]]:
    """Chunk and micro-batch: ``ranks`` micro-batches go through one chunk before they go through the next."""
    order = list(chunks)
    return [
        (chunk, one)
        for start in range(0, count, ranks)
        for chunk in order
        for one in range(start, min(start + ranks, count))
    ]


def _ahead(schedule: str, rank: int, ranks: int, count: int) -> int:
    """Forward passes before the first pair of a forward and a backward pass."""
    if schedule == "1f1b":
        return ranks - 1 - rank
    # the last group of micro-batches would be short, and ranks could wait for each other
    if schedule == "gpipe" or count % ranks:
        return CHUNKS[schedule] * count
    return 2 * (ranks - 1 - rank) + (CHUNKS[schedule] - 1) * ranks
