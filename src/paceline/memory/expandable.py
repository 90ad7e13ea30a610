"""torch's caching allocator with ``expandable_segments:True``, as ``paceline`` starts it: what would be reserved.

Such a segment is a stretch of addresses longer than the GPU's memory, one for each pool, stream and size class, of
which pages are taken from the GPU as they are needed: 2 MiB each for small blocks, 20 MiB for large ones. A batch that
is a little larger than those before it makes the segment grow where fixed ones would leave pieces that are of no use.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``get_free_block``, ``find_expandable_block``,
``try_allocate_expandable_block``, ``map_block``, ``unmap_block``, ``release_expandable_segment_blocks``).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Hashable, MutableMapping
from typing import Final, final

DEFAULT: Final = (0, 0)
"""The pool of everything outside CUDA graphs; torch's own id of it."""

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to multiples of it
SMALL_SIZE = 2**20  # kSmallSize: up to it from small segments
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer: a page of small segments
LARGE_SEGMENT = 20 * 2**20  # large_segment_size, once kLargeBuffer: a page of large ones

VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator, which it reads when it is loaded; the second is their older name."""


def ask_for_it(environment: MutableMapping[str, str]) -> None:
    """Have torch's allocator use expandable segments, unless it was set up by somebody; for Linux, where they exist."""
    if sys.platform == "linux" and not any(name in environment for name in VARIABLES):
        environment[VARIABLES[0]] = "expandable_segments:True"


@final
class Stretch:
    """Addresses next to each other in one state: a handle for ``ExpandableAllocator.free``."""

    __slots__ = ("address", "after", "arena", "before", "mapped", "size", "used")

    def __init__(self, arena: _Arena, address: int, size: int, *, mapped: bool) -> None:
        self.arena, self.address, self.size, self.mapped, self.used = arena, address, size, mapped, False
        self.before: Stretch | None = None
        self.after: Stretch | None = None


@final
class _Arena:
    """One segment: its stretches in a row, the free ones with memory by size, those without by address."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[tuple[int, int, Stretch]] = []
        self.unmapped: list[tuple[int, Stretch]] = []
        endless = Stretch(self, 0, 2**62, mapped=False)
        self.put(endless)

    def put(self, stretch: Stretch) -> None:
        if stretch.mapped:
            insort(self.free, (stretch.size, stretch.address, stretch))
        else:
            insort(self.unmapped, (stretch.address, stretch))

    def drop(self, stretch: Stretch) -> None:
        if stretch.mapped:
            del self.free[bisect_left(self.free, (stretch.size, stretch.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (stretch.address,))]

    def best_fit(self, size: int) -> Stretch | None:
        """The smallest free stretch that is large enough, counting those that can grow as large as they can get."""
        at = bisect_left(self.free, (size,))
        if at == len(self.free):
            return None
        while at + 1 < len(self.free) and _grown(self.free[at + 1][2]) < _grown(self.free[at][2]):
            at += 1
        return self.free.pop(at)[2]

    def cut(self, stretch: Stretch, size: int) -> None:
        """Leave ``size`` bytes of a stretch that is in no list; the rest is one of its own."""
        rest = Stretch(self, stretch.address + size, stretch.size - size, mapped=stretch.mapped)
        rest.before, rest.after, stretch.size = stretch, stretch.after, size
        if rest.after is not None:
            rest.after.before = rest
        stretch.after = rest
        self.put(rest)

    def join(self, stretch: Stretch) -> None:
        """Add free neighbours in the same state to a stretch that is in no list."""
        for other in (stretch.before, stretch.after):
            if other is None or other.used or other.mapped != stretch.mapped:
                continue
            self.drop(other)
            stretch.size += other.size
            if other is stretch.before:
                stretch.address, stretch.before = other.address, other.before
                if stretch.before is not None:
                    stretch.before.after = stretch
            else:
                stretch.after = other.after
                if stretch.after is not None:
                    stretch.after.before = stretch


@final
class ExpandableAllocator:
    """What ``torch.cuda`` would report of a GPU's memory after the same calls in the same order. Sizes in bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        """As ``torch.cuda.memory_allocated`` and ``max_memory_allocated``."""
        self.reserved = self.peak_reserved = 0
        """As ``torch.cuda.memory_reserved`` and ``max_memory_reserved``."""
        self._arenas: dict[tuple[Hashable, Hashable, bool], _Arena] = {}

    def allocate(self, num_bytes: int, pool: Hashable = DEFAULT, stream: Hashable = 0) -> Stretch:
        """A block of at least ``num_bytes``; none of them costs nothing.

        Args:
            pool: a private pool, as that of CUDA graphs.
            stream: whose blocks may be used again; others' are not.
        """
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        arena = self._arenas.get((pool, stream, small))
        if arena is None:
            arena = self._arenas[pool, stream, small] = _Arena(SMALL_SEGMENT if small else LARGE_SEGMENT)
        if not size:
            return Stretch(arena, 0, 0, mapped=True)
        block = arena.best_fit(size) or self._grow(arena, size)
        if block.size > size:
            arena.cut(block, size)
        block.used = True
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Stretch) -> None:
        """Give a block back to its pool and stream; it joins the free ones next to it.

        Raises:
            ValueError: it was freed before.
        """
        if not block.size:
            return
        if not block.used:
            raise ValueError("the block was freed before")
        self.allocated -= block.size
        block.used = False
        block.arena.join(block)
        block.arena.put(block)

    def empty_cache(self) -> None:
        """Give whole pages without a live block back to the GPU; those of private pools stay."""
        for (pool, _, _), arena in self._arenas.items():
            if pool == DEFAULT:
                for _, _, stretch in list(arena.free):
                    self._unmap(arena, stretch)

    def _grow(self, arena: _Arena, size: int) -> Stretch:
        """The first stretch that has room for ``size`` if it gets memory, with that memory."""
        block = next(found for _, at in arena.unmapped if (found := _room(at, size)) is not None)
        arena.drop(block)
        if not block.mapped:
            self._map(arena, block, size)
        while block.size < size:
            rest = block.after
            assert rest is not None, "the last stretch has no end"
            arena.drop(rest)
            if not rest.mapped:
                self._map(arena, rest, size - block.size)
            arena.put(rest)
            arena.join(block)
        return block

    def _map(self, arena: _Arena, stretch: Stretch, size: int) -> None:
        """Memory for the first ``size`` bytes of a stretch that is in no list; the rest is one of its own."""
        taken = min(-(-size // arena.page) * arena.page, stretch.size)
        if taken < stretch.size:
            arena.cut(stretch, taken)
        stretch.mapped = True
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _unmap(self, arena: _Arena, stretch: Stretch) -> None:
        first = -(-stretch.address // arena.page) * arena.page
        last = (stretch.address + stretch.size) // arena.page * arena.page
        if first >= last:
            return
        arena.drop(stretch)
        if stretch.address + stretch.size > last:
            arena.cut(stretch, last - stretch.address)
        if first > stretch.address:
            arena.cut(stretch, first - stretch.address)
            arena.put(stretch)
            assert stretch.after is not None
            stretch = stretch.after
            arena.drop(stretch)
        stretch.mapped = False
        self.reserved -= last - first
        arena.join(stretch)
        arena.put(stretch)


def _grown(stretch: Stretch) -> int:
    """As large as a free stretch can get."""
    after = stretch.after
    return stretch.size + (after.size if after is not None and not after.mapped else 0)


def _room(unmapped: Stretch, size: int) -> Stretch | None:
    """Where ``size`` bytes begin that have memory or can get it, at this stretch or the free one before it."""
    before = unmapped.before
    start = before if before is not None and not before.used else unmapped
    at: Stretch | None = start
    found = 0
    while at is not None and not at.used and found < size:
        found += at.size
        at = at.after
    return start if found >= size else None
