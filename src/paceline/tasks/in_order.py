"""What ranks have of a split, put together in the order of the split: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.seams import World

BLOCK_BYTES = 64 * 2**20
"""Exchanged at a time: large enough to fill a link, small enough beside a model."""


def in_order(
    world: World, places: Sequence[int], parts: Sequence[Tensor], device: torch.device, block_bytes: int = BLOCK_BYTES
) -> list[Tensor]:
    """Every rank's parts, one after the other by their places, on the first rank; nothing on the others.

    A rank writes its parts into blocks of zeros, and the blocks are added up byte by byte: one collective that all
    backends have, and adding zero to a byte changes no bit, neither of -0.0 nor of NaN.

    Args:
        world: all its ranks call this; some may have no parts.
        places: where each of ``parts`` stands; no two ranks have the same place, and there may be gaps.
        parts: on the host, [n, ...] with an n of each one's own; the rest of the shape, and dtype, are those of all.
        device: where collectives work.
        block_bytes: most bytes exchanged at a time, though never less than one part.

    Returns:
        Blocks on the host, [n, ...] of many parts each.

    Raises:
        ValueError: ranks claim the same place, so they are not at work on the same split. All ranks raise it.
    """
    form = [list(parts[0].shape[1:]), str(parts[0].dtype)] if parts else None
    told = world.gather([list(places), [len(part) for part in parts], form])
    lengths = {place: length for theirs in told for place, length in zip(theirs[0], theirs[1], strict=True)}
    if len(lengths) != sum(len(theirs[0]) for theirs in told):
        raise ValueError("two ranks have the same batch of a split: their data differ")
    if not lengths:
        return []
    shape, dtype_name = next(theirs[2] for theirs in told if theirs[2])
    nothing = torch.empty(0, *shape, dtype=getattr(torch, dtype_name.removeprefix("torch.")))
    row_bytes = max(1, nothing.new_empty(1, *shape).nbytes)

    mine = dict(zip(places, parts, strict=True))
    blocks = []
    for group in _groups(lengths, block_bytes // row_bytes):
        block = torch.cat([mine.get(place, nothing.new_zeros(lengths[place], *shape)) for place in group])
        added = world.all_reduce(block.view(torch.uint8).to(device))
        if world.is_first:
            blocks.append(added.cpu().view(nothing.dtype))
    return blocks


def _groups(lengths: Mapping[int, int], most: int) -> Iterator[list[int]]:
    """Neighbouring places whose lengths add up to ``most``; one alone may be longer."""
    group: list[int] = []
    held = 0
    for place in sorted(lengths):
        if group and held + lengths[place] > most:
            yield group
            group, held = [], 0
        group.append(place)
        held += lengths[place]
    yield group
