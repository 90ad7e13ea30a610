"""torch's caching allocator in its own settings, for what was measured with them: segments that do not grow.

``paceline`` starts torch with expandable segments, and its plans replay those (``paceline.memory.expandable``). The
rules here are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``,
``get_free_block``, ``should_split``, ``free_block``) with default settings, of torch 2.10 to 2.13, for one stream
without CUDA graphs, on a GPU that is never full. Where the driver puts segments decides between free blocks of one
size: here, each above the last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import final

from paceline.memory.expandable import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE

MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from it on blocks get segments of their own, in multiples of LARGE_STEP
LARGE_STEP = 2 * 2**20  # kRoundLarge


@final
@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment, in bytes: a handle for ``FixedSegments.free``, good until it is freed."""

    address: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    used: bool = False


@final
class FixedSegments:
    """What ``torch.cuda`` would report of a GPU's memory after the same calls in the same order. Sizes in bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        """As ``torch.cuda.memory_allocated`` and ``max_memory_allocated``, with what was too little to split."""
        self.reserved = 0
        """As ``torch.cuda.memory_reserved``, and as ``max_memory_reserved``: nothing is given back to the GPU here."""
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least ``num_bytes``; none of them costs nothing."""
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        if not size:
            return Block(0, 0, small)
        free = self._free[small]
        at = bisect_left(free, (size,))
        block = free.pop(at)[2] if at < len(free) else self._new_segment(size, small)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > SMALL_SIZE:
            rest = Block(block.address + size, left, small, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._put(rest)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it joins the free ones next to it in its segment."""
        if not block.size:
            return
        self.allocated -= block.size
        block.used = False
        for first, second in ((block.before, block), (block, block.after)):
            if first is None or second is None or first.used or second.used:
                continue
            other = second if first is block else first
            own = self._free[other.small]
            del own[bisect_left(own, (other.size, other.address))]
            block.address, block.size = first.address, first.size + second.size
            block.before, block.after = first.before, second.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._put(block)

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _new_segment(self, size: int, small: bool) -> Block:
        own = -(-size // LARGE_STEP) * LARGE_STEP
        segment = own if size >= MIN_LARGE else SMALL_SEGMENT if small else LARGE_SEGMENT
        self.reserved += segment
        return Block(self.reserved - segment, segment, small)
