"""Micro-batches of one shape on all ranks, for passes that ranks record and replay together (``Gradients.ranks_meet``).

Nobody is asked: each rank works out the whole deal of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.order import OrderState, ShuffledOrder
from paceline.seams import Layout


@dataclass(frozen=True)
class Widths:
    """What the micro-batches of a step are to be made as wide as.

    Args:
        slots: of each micro-batch of a rank, in turn; None: as wide as it is by itself.
        alike: whether all ranks' then have the same shapes.
    """

    slots: Sequence[int | None]
    alike: bool


def widths(order: ShuffledOrder, layout: Layout, at: OrderState, world_size: int) -> Widths:
    """Of the step at ``at``: each as wide as the widest rank's, where the layout can do that and counts are equal.

    Ranks deal by tokens, so that the widest is seldom wider by more than a few hundredths.
    """
    pieces = order.of_all_ranks(at, world_size)
    each = len(pieces) // world_size
    slots: list[int | None] = []
    for index in range(each):
        sizes = [layout.size(ids) for ids in pieces[index::each]]
        narrow, wide = (choose(size.slots for size in sizes) for choose in (min, max))
        if len({size.samples for size in sizes}) > 1 or not sizes[0].samples or wide - narrow > layout.widens_by:
            return Widths([None] * each, alike=False)
        slots.append(wide if layout.widens_by else None)
    return Widths(slots, alike=True)
