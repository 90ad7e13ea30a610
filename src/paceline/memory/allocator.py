"""Torch's caching allocator for CUDA, replayed without a card: what it would allocate and reserve, to the byte.

The rules are those of the native backend of ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_pool``,
``get_allocation_size``, ``get_free_block``, ``should_split``, ``alloc_found_block``, ``free_block``,
``release_cached_blocks``) with default settings: no expandable segments, no ``max_split_size_mb``, no garbage
collection, no rounding to powers of two. Read in a source of January 2026, between torch 2.10 and 2.11, and in one of
June 2026, between 2.13 and 2.14; they agree in every rule here, and so do the constants and ``large_segment_size``
in ``c10/core/AllocatorConfig.h`` of torch 2.13. With default settings ``release_available_cached_blocks`` does nothing.

Not replayed: ``record_stream``, which puts off a free until other streams are done, at a moment that no plan knows;
and where the driver puts segments, which decides between free blocks of one size: here, each above the last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from paceline.errors import DataError, PacelineError

DEFAULT: Final = (0, 0)
"""The pool of everything outside CUDA graphs; torch's own id of it."""

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to multiples of it
SMALL_SIZE = 2**20  # kSmallSize: up to it from small segments; a large block is split if more than this is left
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer: what the driver is asked for, for a small block
LARGE_SEGMENT = 20 * 2**20  # large_segment_size, once kLargeBuffer: the same for a block below MIN_LARGE
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from it on blocks get segments of their own, in multiples of LARGE_STEP
LARGE_STEP = 2 * 2**20  # kRoundLarge


@final
class OutOfMemory(PacelineError):
    """A segment that the card has no room for, after all that could be given back was. Sizes in bytes.

    Args:
        asked: what the program asked for.
        segment: what the allocator needs for it; the size that torch's own message names.
        allocated: held by live blocks.
        reserved: held by segments, and thus taken from the card.
        capacity: the most that segments may take.
    """

    def __init__(self, *, asked: int, segment: int, allocated: int, reserved: int, capacity: int) -> None:
        self.asked, self.segment = asked, segment
        self.allocated, self.reserved, self.capacity = allocated, reserved, capacity
        needed, kept, held, most = (f"{size / 2**20:,.1f} MiB" for size in (segment, reserved, allocated, capacity))
        super().__init__(f"out of memory: {needed} more do not fit; {kept} of {most} are reserved, {held} allocated")


@final
class Block:
    """Part of a segment: a handle for ``CachingAllocator.free``. Address and size, in bytes, hold until it is freed."""

    __slots__ = ("_after", "_before", "_cache", "address", "size")

    def __init__(
        self, address: int, size: int, cache: _Cache, before: Block | None = None, after: Block | None = None
    ) -> None:
        self.address, self.size = address, size
        self._cache, self._before, self._after = cache, before, after


@final
class _Cache:
    """The free blocks of one pool, stream and size class, in the order in which they are searched."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: list[tuple[int, int, Block]] = []

    def put(self, block: Block) -> None:
        insort(self.blocks, (block.size, block.address, block))

    def drop(self, block: Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]

    def best_fit(self, size: int) -> Block | None:
        """Take out the smallest block that is large enough; of equal ones, that with the lowest address."""
        at = bisect_left(self.blocks, (size,))
        return self.blocks.pop(at)[2] if at < len(self.blocks) else None

    def whole_segments(self) -> list[Block]:
        return [block for *_, block in self.blocks if block._before is None and block._after is None]


@final
class CachingAllocator:
    """What ``torch.cuda`` would report of a card's memory after the same calls in the same order. Sizes in bytes.

    Args:
        capacity: the most that segments may take together: the card's memory less what is taken without the allocator
            (context, NCCL). None: no end.
        place: the address of a new segment of a given size; by default each stands above the last.
    """

    def __init__(self, capacity: int | None = None, place: Callable[[int], int] | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.peak_allocated = 0
        """As ``torch.cuda.memory_allocated`` and ``max_memory_allocated``: rounded sizes of live blocks, all pools."""
        self.reserved = self.peak_reserved = 0
        """As ``torch.cuda.memory_reserved`` and ``max_memory_reserved``: sizes of segments, all pools."""
        self._place = place or self._above
        self._top = LARGE_STEP
        self._live: set[Block] = set()
        self._caches: dict[tuple[Hashable, Hashable, bool], _Cache] = {}
        self._released: set[Hashable] = set()

    def allocate(self, num_bytes: int, pool: Hashable = DEFAULT, stream: Hashable = 0) -> Block:
        """A block of at least ``num_bytes``; none of them costs nothing.

        Args:
            pool: a private pool, as that of a CUDA graph while it is captured: its segments serve it alone. One that
                was released is in use again.
            stream: whose blocks may be used again; others' are not.

        Raises:
            OutOfMemory: no free block fits, and the card has no room for another segment.
        """
        if num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes")
        self._released.discard(pool)
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        key = pool, stream, size <= SMALL_SIZE
        cache = self._caches.get(key)
        if cache is None:
            cache = self._caches[key] = _Cache(small=size <= SMALL_SIZE)
        free = cache.best_fit(size) if size else Block(0, 0, cache)
        block = _carve(free or self._new_segment(cache, size, num_bytes, pool), size)
        self._live.add(block)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool and stream; it joins the free blocks next to it.

        Raises:
            ValueError: it was freed before, or is another allocator's.
        """
        if block not in self._live:
            raise ValueError("the block was freed before, or is of another allocator")
        self._live.remove(block)
        if block.size == 0:
            return
        self.allocated -= block.size
        cache, before, after = block._cache, block._before, block._after
        if before is not None and before not in self._live:
            cache.drop(before)
            block.address, block.size, block._before = before.address, before.size + block.size, before._before
            if block._before is not None:
                block._before._after = block
        if after is not None and after not in self._live:
            cache.drop(after)
            block.size, block._after = block.size + after.size, after._after
            if block._after is not None:
                block._after._before = block
        cache.put(block)

    def release_pool(self, pool: Hashable) -> None:
        """Say that a private pool's graphs are gone; its segments go at the next ``empty_cache``, as they get free."""
        if pool == DEFAULT:
            raise ValueError("the default pool is always in use")
        self._released.add(pool)

    def empty_cache(self, pool: Hashable = DEFAULT) -> None:
        """Give segments without a live block back to the card: those of the default pool and of all released ones, or
        those of one released pool alone. A private pool in use keeps what it has.
        """
        asked = self._released | {DEFAULT} if pool == DEFAULT else self._released & {pool}
        for (owner, _, _), cache in self._caches.items():
            if owner in asked:
                for block in cache.whole_segments():
                    cache.drop(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``: peaks begin again at what is held now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    @property
    def inactive_split_bytes(self) -> int:
        """Free, but in segments with a live block: of use to blocks of the same pool, stream and size class only.

        Torch's statistic of the same name; ``reserved - allocated`` less this is what ``empty_cache`` can give back,
        pools in use aside.
        """
        free = sum(size for cache in self._caches.values() for size, *_ in cache.blocks)
        return free - sum(block.size for cache in self._caches.values() for block in cache.whole_segments())

    def _new_segment(self, cache: _Cache, size: int, asked: int, pool: Hashable) -> Block:
        """A segment for a block of ``size``, as one free block that is in no cache yet."""
        own = -(-size // LARGE_STEP) * LARGE_STEP
        segment = own if size >= MIN_LARGE else SMALL_SEGMENT if cache.small else LARGE_SEGMENT
        if self.capacity is not None and self.reserved + segment > self.capacity:
            if pool == DEFAULT:
                # not for a private pool: while a graph is captured nothing may be given back to the driver
                self.empty_cache()
            if self.reserved + segment > self.capacity:
                held = {"allocated": self.allocated, "reserved": self.reserved, "capacity": self.capacity}
                raise OutOfMemory(asked=asked, segment=segment, **held)
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(self._place(segment), segment, cache)

    def _above(self, segment: int) -> int:
        self._top += segment
        return self._top - segment


def _carve(free: Block, size: int) -> Block:
    """The first ``size`` bytes of a free block, or all of it where too little would be left to keep."""
    cache, left = free._cache, free.size - size
    if left >= MIN_BLOCK if cache.small else left > SMALL_SIZE:
        block = Block(free.address, size, cache, free._before, free)
        free.address, free.size, free._before = free.address + size, left, block
        cache.put(free)
    else:
        # not the same object: a handle that was freed must not come to life again
        block = Block(free.address, free.size, cache, free._before, free._after)
        if block._after is not None:
            block._after._before = block
    if block._before is not None:
        block._before._after = block
    return block


@dataclass(frozen=True)
class Parting:
    """The first entry of a trace, by its position, at which the replay does something else than torch did."""

    entry: int
    why: str


@dataclass(frozen=True)
class Reserved:
    """Bytes of all segments after one of torch's calls, whose last entry is at this position in the trace."""

    entry: int
    predicted: int
    recorded: int


@dataclass(frozen=True)
class Replay:
    """A trace of torch's allocator beside what ``CachingAllocator`` makes of the same calls."""

    reserved: tuple[Reserved, ...]
    """Over time, wherever one of the two changed."""
    peak_active: int
    """Predicted bytes of blocks up to the end of their free: torch's ``active_bytes.all.peak``."""
    parting: Parting | None
    """None: every block is where torch put it, and every segment came and went with torch's."""

    @property
    def peak_predicted(self) -> int:
        """The most bytes that segments took, as predicted."""
        return max((at.predicted for at in self.reserved), default=0)

    @property
    def peak_recorded(self) -> int:
        """The most bytes that segments took, as recorded: ``torch.cuda.max_memory_reserved``."""
        return max((at.recorded for at in self.reserved), default=0)


def replay(entries: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]] = ()) -> Replay:
    """Repeat what a card did, and say whether this allocator would have done the same.

    The trace has to be whole: recorded from before the first tensor on the card, in torch's default settings.

    Args:
        entries: ``torch.cuda.memory._snapshot()["device_traces"][device]``.
        segments: ``torch.cuda.memory._snapshot()["segments"]`` of the same snapshot, taken while the graphs live: tells
            private pools apart where the entries do not name them (torch 2.11; 2.13 does, as ``pool_id``).

    Raises:
        DataError: not a device's trace, or one recorded with expandable segments.
    """
    if not all(isinstance(entry, Mapping) and "action" in entry for entry in entries):
        raise DataError(
            "not the trace of a device",
            why="each of its entries is a dict with an action",
            fix='pass snapshot["device_traces"][device]',
        )
    repeat = _Repeat()
    for index, (entry, pool) in enumerate(zip(entries, _pools(entries, segments), strict=True)):
        repeat.take(index, entry, pool)
    return repeat.end(len(entries) - 1)


def _pools(entries: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> Iterator[Hashable]:
    """Each entry's pool: named by itself, or that of the segment it lies in.

    Private segments in a snapshot are those alive at its end: from the last time that their address was allocated.
    """
    private = {at["address"]: at for at in segments if tuple(at["segment_pool_id"]) != DEFAULT}
    last = {entry["addr"]: index for index, entry in enumerate(entries) if entry["action"] == "segment_alloc"}
    starts: list[int] = []
    for index, entry in enumerate(entries):
        address = entry.get("addr", 0)
        if last.get(address) == index and address in private:
            insort(starts, address)
        at = bisect_right(starts, address)
        below: Mapping[str, Any] = private[starts[at - 1]] if at else {"address": 0, "total_size": 0}
        inside = address < below["address"] + below["total_size"]
        yield tuple(entry["pool_id"] if "pool_id" in entry else below["segment_pool_id"] if inside else DEFAULT)


@final
class _Repeat:
    """The state of a replay: torch's blocks by their address, and how far the two have come."""

    def __init__(self) -> None:
        self._allocator = CachingAllocator(place=self._place)
        self._beyond = 2**60  # above every address of a card: where segments go that torch did not make
        self._blocks: dict[int, Block] = {}
        self._recorded, self._standing = 0, set[int]()
        """Of torch's segments the bytes, and the addresses."""
        self._made: Mapping[str, Any] | None = None
        """A segment that torch got from the driver, for the block that comes next."""
        self._emptied: set[Hashable] = set()
        """Pools whose segments torch is giving back, one entry each."""
        self._reserved: list[Reserved] = []
        self._parting: Parting | None = None

    def take(self, index: int, entry: Mapping[str, Any], pool: Hashable) -> None:
        action = entry["action"]
        if action == "segment_free":
            self._recorded -= entry["size"]
            self._standing.discard(entry["addr"])
            self._emptied.add(pool)
            return
        self._give_back(index - 1)
        if action == "segment_alloc":
            if entry["addr"] in self._standing:
                self._part(index, "torch made a segment where there is one: entries are missing")
            self._standing.add(entry["addr"])
            self._recorded += entry["size"]
            self._made = entry
        elif action == "alloc":
            self._allocate(index, entry, pool)
        elif action == "free_completed":
            block = self._blocks.pop(entry["addr"], None)
            if block is None:
                self._part(index, "torch freed a block whose allocation is not in the trace: recorded too late?")
            else:
                self._allocator.free(block)
        elif action in ("segment_map", "segment_unmap"):
            raise DataError(
                "a trace with expandable segments",
                why="they are mapped page by page, by other rules than those replayed here",
                fix="record it without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF",
            )

    def end(self, index: int) -> Replay:
        self._give_back(index)
        return Replay(tuple(self._reserved), self._allocator.peak_allocated, self._parting)

    def _allocate(self, index: int, entry: Mapping[str, Any], pool: Hashable) -> None:
        block = self._allocator.allocate(entry["size"], pool, entry["stream"])
        self._blocks[entry["addr"]], self._made = block, None
        self._settle(index)
        if block.address != entry["addr"]:
            self._part(index, f"torch put {entry['size']:,} bytes elsewhere")

    def _give_back(self, index: int) -> None:
        """Empty the pools that torch emptied, once the last of their segments was seen."""
        if not self._emptied:
            return
        for pool in self._emptied - {DEFAULT}:
            self._allocator.release_pool(pool)
            self._allocator.empty_cache(pool)
        if DEFAULT in self._emptied:
            self._allocator.empty_cache()
        self._emptied = set()
        self._settle(index)

    def _settle(self, index: int) -> None:
        now = Reserved(index, self._allocator.reserved, self._recorded)
        last = self._reserved[-1] if self._reserved else Reserved(-1, 0, 0)
        if (now.predicted, now.recorded) != (last.predicted, last.recorded):
            self._reserved.append(now)
        if now.predicted != now.recorded:
            self._part(index, f"{now.predicted:,} bytes reserved, {now.recorded:,} by torch")

    def _part(self, index: int, why: str) -> None:
        self._parting = self._parting or Parting(index, why)

    def _place(self, segment: int) -> int:
        """Where torch put its own segment, so that ties between blocks are decided alike."""
        if self._made is not None and self._made["size"] == segment and self._parting is None:
            return int(self._made["addr"])
        self._beyond += segment
        return self._beyond - segment
