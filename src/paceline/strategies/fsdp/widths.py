"""Micro-batches of one shape on all ranks, for passes that ranks capture and replay together.

Nobody is asked: each rank works out the whole split of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.seams import Ids, Layout, StepInput


def with_widths(given: StepInput, pieces: Sequence[Ids], layout: Layout) -> StepInput:
    """The step's input, each micro-batch as wide as the widest rank's, where the layout can do that and counts agree.

    Ranks split by tokens, so that the widest is seldom wider by more than a few hundredths.

    Args:
        given: one rank's.
        pieces: the micro-batches of every rank, rank by rank.
    """
    each = len(given.microbatches)
    widths: list[int | None] = []
    for index in range(each):
        sizes = [layout.size(ids) for ids in pieces[index::each]]
        narrow, wide = (choose(size.slots for size in sizes) for choose in (min, max))
        if len({size.samples for size in sizes}) > 1 or not sizes[0].samples or wide - narrow > layout.widens_by:
            return replace(given, widths=(), same_shapes=False)
        widths.append(wide if layout.widens_by else None)
    return replace(given, widths=tuple(widths))
