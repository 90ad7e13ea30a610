"""Torch's allocator without a card: each rule with figures worked out by hand, and all of them against a slow twin."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Hashable
from typing import Any

import pytest

from paceline.errors import DataError, PacelineError
from paceline.memory.allocator import DEFAULT, Block, CachingAllocator, OutOfMemory, Reserved, replay

KI, MI = 2**10, 2**20
GRAPH = (0, 7)

Trace = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("asked", "allocated"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (MI - 1, MI), (MI, MI)]
)
def test_sizes_are_rounded_up_to_512_bytes_and_nothing_costs_nothing(asked: int, allocated: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(asked)
    assert (block.size, allocator.allocated, allocator.reserved) == (allocated, allocated, 2 * MI if asked else 0)
    allocator.free(block)
    assert allocator.allocated == 0


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MI),
        (MI, 2 * MI),
        (MI + 1, 20 * MI),
        (10 * MI - 512, 20 * MI),
        (10 * MI - 511, 10 * MI),  # the rounded size decides
        (10 * MI, 10 * MI),
        (10 * MI + 1, 12 * MI),
        (35 * MI, 36 * MI),
        (36 * MI, 36 * MI),
    ],
)
def test_a_segment_is_2_or_20_mib_or_a_multiple_of_2(asked: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.reserved, allocator.peak_reserved) == (segment, segment)


def test_a_small_block_is_split_when_512_bytes_are_left() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (MI, MI - 512)]
    assert allocator.inactive_split_bytes == 512
    blocks.append(allocator.allocate(512))
    assert [block.address - blocks[0].address for block in blocks] == [0, MI, 2 * MI - 512]
    assert (allocator.reserved, allocator.inactive_split_bytes) == (2 * MI, 0), "the segment is full to the byte"


@pytest.mark.parametrize(
    ("asked", "allocated", "left"),
    [
        (11 * MI, 12 * MI, 0),  # 1 MiB would be left: not more than 1 MiB
        (11 * MI + 512, 12 * MI, 0),
        (11 * MI - 512, 11 * MI - 512, MI + 512),
        (10 * MI + 512, 10 * MI + 512, 2 * MI - 512),
    ],
)
def test_a_large_block_is_split_when_more_than_a_mebibyte_is_left(asked: int, allocated: int, left: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.reserved, allocator.allocated, allocator.inactive_split_bytes) == (12 * MI, allocated, left)


def test_the_remainder_of_an_unsplit_block_counts_as_allocated_when_it_is_used_again() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MI))
    again = allocator.allocate(11 * MI + 512)
    assert (again.size, allocator.allocated, allocator.reserved) == (12 * MI, 12 * MI, 12 * MI)


def test_the_smallest_block_that_fits_is_used_and_of_equals_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MI) for size in (12, 16, 14, 14)]
    _, sixteen, fourteen, fourteen_too = (block.address for block in blocks)
    for block in reversed(blocks):
        allocator.free(block)
    addresses = [allocator.allocate(13 * MI).address for _ in range(3)]
    assert addresses == [fourteen, fourteen_too, sixteen]
    assert allocator.reserved == 56 * MI, "nothing had to be asked for"


def test_small_and_large_blocks_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MI))
    allocator.allocate(MI)
    assert allocator.reserved == 22 * MI, "the small block has a segment of its own"
    allocator.allocate(MI + 512)
    assert allocator.reserved == 22 * MI, "the large block comes from the free segment"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_neighbours_join_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MI) for _ in range(3)]
    assert (allocator.reserved, allocator.inactive_split_bytes) == (20 * MI, 5 * MI)
    start = blocks[0].address
    for number in order:
        allocator.free(blocks[number])
    assert allocator.inactive_split_bytes == 0, "the segment is whole again"
    assert allocator.allocate(20 * MI).address == start
    assert allocator.reserved == 20 * MI


def test_segments_next_to_each_other_do_not_join() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(20 * MI), allocator.allocate(20 * MI)
    assert second.address == first.address + 20 * MI
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(30 * MI)
    assert allocator.reserved == 70 * MI


def test_a_block_is_used_again_on_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MI, stream=1))
    allocator.allocate(12 * MI, stream=2)
    assert allocator.reserved == 24 * MI
    allocator.allocate(12 * MI, stream=1)
    assert allocator.reserved == 24 * MI


def test_the_segments_of_a_private_pool_serve_it_alone() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MI))
    allocator.free(allocator.allocate(12 * MI, GRAPH))
    assert allocator.reserved == 24 * MI
    kept = allocator.allocate(12 * MI, GRAPH)
    assert (allocator.reserved, allocator.allocated) == (24 * MI, 12 * MI), "pools count together, as in torch"
    allocator.allocate(12 * MI, "another graph")
    assert allocator.reserved == 36 * MI
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved == 24 * MI, "the default pool's segment goes, both graphs keep theirs"
    allocator.empty_cache(GRAPH)
    assert allocator.reserved == 24 * MI, "it is in use"


def test_a_released_pool_is_emptied_as_its_blocks_are_freed() -> None:
    allocator = CachingAllocator()
    output = allocator.allocate(12 * MI, GRAPH)
    allocator.free(allocator.allocate(14 * MI, GRAPH))
    cached = allocator.allocate(16 * MI)
    allocator.free(cached)
    allocator.free(allocator.allocate(18 * MI, "another graph"))
    allocator.release_pool(GRAPH)
    allocator.release_pool("another graph")
    assert allocator.reserved == 60 * MI
    allocator.empty_cache(GRAPH)
    assert allocator.reserved == 46 * MI, "others keep their cache, the output its segment"
    allocator.free(output)
    allocator.empty_cache()
    assert allocator.reserved == 0
    allocator.free(allocator.allocate(12 * MI, GRAPH))
    allocator.empty_cache()
    assert allocator.reserved == 12 * MI, "a new graph took the pool in use again"
    with pytest.raises(ValueError, match="always in use"):
        allocator.release_pool(DEFAULT)


def test_emptying_the_cache_gives_back_whole_segments_and_nothing_else() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MI))
    allocator.free(allocator.allocate(KI))
    kept = allocator.allocate(5 * MI)  # split from the 30
    assert (allocator.reserved, allocator.inactive_split_bytes) == (32 * MI, 25 * MI)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.inactive_split_bytes, allocator.allocated) == (30 * MI, 25 * MI, 5 * MI)
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved) == (0, 32 * MI)


def test_on_a_full_card_cached_segments_are_given_back_first() -> None:
    allocator = CachingAllocator(capacity=40 * MI)
    allocator.free(allocator.allocate(24 * MI))
    allocator.free(allocator.allocate(KI))
    allocator.allocate(40 * MI)
    assert (allocator.reserved, allocator.peak_reserved) == (40 * MI, 40 * MI), "26 given back, 40 taken"


def test_out_of_memory_says_what_was_asked_and_held_and_the_allocator_goes_on() -> None:
    allocator = CachingAllocator(capacity=43 * MI)
    kept = allocator.allocate(25 * MI - 512)  # of 26, so that the rest is stuck
    allocator.free(allocator.allocate(16 * MI))
    assert allocator.reserved == 42 * MI
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(17 * MI + 1)
    found = caught.value
    assert (found.asked, found.segment, found.capacity) == (17 * MI + 1, 18 * MI, 43 * MI)
    assert (found.allocated, found.reserved) == (25 * MI - 512, 26 * MI), "after the cache was given back"
    assert isinstance(found, PacelineError)
    told = "18.0 MiB more do not fit; 26.0 MiB of 43.0 MiB are reserved, 25.0 MiB allocated"
    assert str(found) == f"out of memory: {told}"
    fits = allocator.allocate(16 * MI)
    assert (allocator.allocated, allocator.reserved) == (41 * MI - 512, 42 * MI)
    allocator.free(kept)
    allocator.free(fits)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_a_segment_that_fills_the_card_to_the_byte_fits() -> None:
    allocator = CachingAllocator(capacity=22 * MI)
    allocator.allocate(1)
    allocator.allocate(20 * MI)
    assert allocator.reserved == 22 * MI
    with_cache = CachingAllocator(capacity=44 * MI)
    with_cache.free(with_cache.allocate(24 * MI, stream=1))
    with_cache.allocate(20 * MI)
    assert with_cache.reserved == 44 * MI, "the cache is not given up without need"
    with pytest.raises(OutOfMemory):
        CachingAllocator(capacity=22 * MI - 1).allocate(22 * MI)
    with pytest.raises(OutOfMemory):
        CachingAllocator(capacity=0).allocate(1)


def test_nothing_is_given_back_while_a_graph_is_captured() -> None:
    allocator = CachingAllocator(capacity=40 * MI)
    allocator.free(allocator.allocate(24 * MI))
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(20 * MI, GRAPH)
    assert caught.value.reserved == 24 * MI
    allocator.empty_cache()  # as torch.cuda.graph does before it captures
    allocator.allocate(20 * MI, GRAPH)
    assert allocator.reserved == 20 * MI


def test_memory_of_released_pools_is_given_back_on_a_full_card() -> None:
    allocator = CachingAllocator(capacity=40 * MI)
    allocator.free(allocator.allocate(24 * MI, GRAPH))
    with pytest.raises(OutOfMemory):
        allocator.allocate(20 * MI)
    allocator.release_pool(GRAPH)
    allocator.allocate(20 * MI)
    assert allocator.reserved == 20 * MI


def test_peaks_begin_again_at_what_is_held() -> None:
    allocator = CachingAllocator()
    kept = allocator.allocate(12 * MI)
    allocator.free(allocator.allocate(20 * MI))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (32 * MI, 32 * MI)
    allocator.empty_cache()
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (12 * MI, 12 * MI)
    allocator.free(kept)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (12 * MI, 12 * MI)


def test_a_block_is_freed_once_by_its_own_allocator() -> None:
    allocator = CachingAllocator()
    for size in (0, 512, 30 * MI):
        block = allocator.allocate(size)
        with pytest.raises(ValueError, match="another allocator"):
            CachingAllocator().free(block)
        allocator.free(block)
        with pytest.raises(ValueError, match="freed before"):
            allocator.free(block)
        allocator.allocate(size)  # the same place: the old handle stays dead
        with pytest.raises(ValueError, match="freed before"):
            allocator.free(block)
    assert allocator.allocated == 30 * MI + 512
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.allocate(-1)


def test_no_torch_is_loaded() -> None:
    code = "import sys, paceline.memory.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_plans_worth_of_steps_settles() -> None:
    """Activations kept forward and freed backward, twice: the second step finds all that it needs in the cache."""
    allocator = CachingAllocator()
    weights = [allocator.allocate(size) for size in (64 * MI, 3 * MI, 4 * KI)]
    after = []
    for _ in range(3):
        kept = [allocator.allocate(size) for layer in range(40) for size in (6 * MI, 4 * KI, 9 * MI + layer * 512)]
        for block in reversed(kept):
            temporary = allocator.allocate(block.size)
            allocator.free(block)
            allocator.free(temporary)
        after.append((allocator.reserved, allocator.allocated))
    assert len(set(after)) == 1, f"steps differ: {after}"
    assert after[0][1] == sum(block.size for block in weights)


class Twin:
    """The same rules a second time, slowly and by other means: every segment is a list of its blocks, read through.

    What it does is written down as torch would, in ``trace``. Segments stand below the last, unlike in the allocator.
    """

    def __init__(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self.trace: Trace = []
        self.top = 2**46

    def record(self, action: str, address: int, size: int, segment: dict[str, Any]) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, **segment["owner"]})

    def allocate(self, num_bytes: int, pool: Hashable, stream: int) -> int:
        size = next(512 * n for n in itertools.count(-(-num_bytes // 512)) if 512 * n >= num_bytes)
        owner, small = {"stream": stream, "pool_id": pool}, size <= MI
        fits = [
            (length, address, segment)
            for segment in self.segments
            if segment["owner"] == owner and segment["small"] == small
            for address, (length, live) in segment["blocks"].items()
            if not live and length >= size
        ]
        if fits:
            length, address, segment = min(fits, key=lambda fit: fit[:2])
        else:
            length = 2 * MI if small else 20 * MI if size < 10 * MI else -(-size // (2 * MI)) * 2 * MI
            self.top -= length
            address, segment = self.top, {"owner": owner, "small": small, "blocks": {}, "at": (self.top, length)}
            self.segments.append(segment)
            self.record("segment_alloc", address, length, segment)
        left = length - size
        if left >= 512 if small else left > MI:
            segment["blocks"][address + size] = (left, False)
            length = size
        segment["blocks"][address] = (length, True)
        self.record("alloc", address, num_bytes, segment)
        return address

    def free(self, address: int) -> None:
        segment = next(segment for segment in self.segments if address in segment["blocks"])
        blocks = segment["blocks"]
        blocks[address] = (blocks[address][0], False)
        for action in ("free_requested", "free_completed"):
            self.record(action, address, 0, segment)
        joined: dict[int, tuple[int, bool]] = {}
        for at, (length, live) in sorted(blocks.items()):
            last = next(reversed(joined), None)
            if last is not None and not live and not joined[last][1]:
                joined[last] = (joined[last][0] + length, False)
            else:
                joined[at] = (length, live)
        segment["blocks"] = joined

    def empty(self) -> None:
        for segment in list(self.segments):
            whole = list(segment["blocks"].values()) == [(segment["at"][1], False)]
            if whole and segment["owner"]["pool_id"] == DEFAULT:
                self.segments.remove(segment)
                self.record("segment_free", *segment["at"], segment)

    @property
    def allocated(self) -> int:
        return sum(size for segment in self.segments for size, live in segment["blocks"].values() if live)

    @property
    def reserved(self) -> int:
        return sum(segment["at"][1] for segment in self.segments)

    @property
    def inactive_split(self) -> int:
        split = (segment["blocks"].values() for segment in self.segments if len(segment["blocks"]) > 1)
        return sum(size for blocks in split for size, live in blocks if not live)


def random_size(draw: random.Random) -> int:
    """Of every class, and around every limit."""
    limit = draw.choice([512, MI, 10 * MI, 12 * MI, 20 * MI, 30 * MI])
    sizes = limit + draw.randint(-700, 700), draw.randint(1, limit), limit - draw.randint(0, 3) * MI
    return max(1, draw.choice(sizes))


@pytest.mark.parametrize("seed", range(6))
def test_at_random_it_does_what_the_twin_does_and_keeps_its_own_laws(seed: int) -> None:
    draw = random.Random(seed)
    twin = Twin()
    made: list[int] = []
    allocator = CachingAllocator(place=lambda size: twin.segments[-1]["at"][0])
    live: list[Block] = []
    most_allocated = most_reserved = 0
    for turn in range(1500):
        growing = (turn // 150) % 2 == 0
        if draw.random() < 0.01:
            allocator.empty_cache()
            twin.empty()
        elif live and draw.random() < (0.3 if growing else 0.7):
            block = live.pop(draw.randrange(len(live)))
            twin.free(block.address)
            allocator.free(block)
        else:
            size, pool, stream = random_size(draw), draw.choice([DEFAULT, DEFAULT, GRAPH]), draw.choice([0, 0, 3])
            made.append(twin.allocate(size, pool, stream))
            live.append(allocator.allocate(size, pool, stream))
            assert live[-1].address == made[-1], f"turn {turn}: {size} bytes are elsewhere"
            assert live[-1].size >= size
        most_allocated, most_reserved = max(most_allocated, twin.allocated), max(most_reserved, twin.reserved)
        assert (allocator.allocated, allocator.reserved) == (twin.allocated, twin.reserved), f"turn {turn}"
        assert allocator.inactive_split_bytes == twin.inactive_split, f"turn {turn}"
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), f"turn {turn}: blocks overlap"
    assert (allocator.peak_allocated, allocator.peak_reserved) == (most_allocated, most_reserved)
    for block in live:
        allocator.free(block)
    assert (allocator.allocated, allocator.inactive_split_bytes) == (0, 0)
    allocator.release_pool(GRAPH)
    allocator.empty_cache()
    assert allocator.reserved == 0

    repeated = replay(twin.trace)
    assert repeated.parting is None, f"the twin's trace is not repeated: {repeated.parting}"
    assert repeated.peak_predicted == repeated.peak_recorded == most_reserved
    assert repeated.peak_active == most_allocated


def entry(action: str, addr: int, size: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    """As torch documents it in ``torch.cuda.memory._snapshot``."""
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": [], "time_us": 1, **more}


BASE = 0x7F4B_E000_0000


def test_a_trace_is_repeated_and_compared_over_time() -> None:
    trace = [
        entry("segment_alloc", BASE, 2 * MI),
        entry("alloc", BASE, 300),
        entry("segment_alloc", BASE + 32 * MI, 20 * MI),
        entry("alloc", BASE + 32 * MI, 6 * MI),
        entry("alloc", BASE + 38 * MI, 4 * MI),
        entry("snapshot", 0, 0),
        entry("free_requested", BASE + 38 * MI, 4 * MI),
        entry("free_completed", BASE + 38 * MI, 4 * MI),
        entry("alloc", BASE + 38 * MI, 14 * MI),
        entry("free_requested", BASE, 300),
        entry("free_completed", BASE, 300),
        entry("segment_free", BASE, 2 * MI),
    ]
    found = replay(trace)
    assert found.parting is None
    assert found.reserved == (
        Reserved(1, 2 * MI, 2 * MI),
        Reserved(3, 22 * MI, 22 * MI),
        Reserved(11, 20 * MI, 20 * MI),
    )
    assert (found.peak_predicted, found.peak_recorded, found.peak_active) == (22 * MI, 22 * MI, 20 * MI + 512)


def test_the_first_entry_at_which_the_two_part_is_named() -> None:
    trace = [
        entry("segment_alloc", BASE, 20 * MI),
        entry("alloc", BASE, 6 * MI),
        entry("segment_alloc", BASE + 32 * MI, 20 * MI),  # though 14 MiB are free in the first
        entry("alloc", BASE + 32 * MI, 6 * MI),
        entry("alloc", BASE + 6 * MI, 6 * MI),
        entry("free_completed", BASE + 32 * MI, 6 * MI),
    ]
    found = replay(trace)
    assert found.parting is not None
    assert (found.parting.entry, found.parting.why) == (3, "20,971,520 bytes reserved, 41,943,040 by torch")
    assert (found.peak_predicted, found.peak_recorded) == (20 * MI, 40 * MI), "it goes on after the parting"

    elsewhere = replay([entry("segment_alloc", BASE, 20 * MI), entry("alloc", BASE + 512, 6 * MI)])
    assert elsewhere.parting is not None
    assert (elsewhere.parting.entry, elsewhere.parting.why) == (1, "torch put 6,291,456 bytes elsewhere")

    made = entry("segment_alloc", BASE, 20 * MI), entry("alloc", BASE, MI + 1)
    kept = replay([*made, entry("segment_free", BASE, 20 * MI)])
    assert kept.parting is not None
    assert kept.parting.entry == 2


def test_torchs_addresses_decide_between_equal_blocks() -> None:
    """The driver put the second segment below the first; torch takes the lower of the two."""
    low, high = BASE, BASE + 64 * MI
    trace = [
        *(entry("segment_alloc", high, 12 * MI), entry("alloc", high, 12 * MI)),
        *(entry("segment_alloc", low, 12 * MI), entry("alloc", low, 12 * MI)),
        *(entry("free_completed", high, 12 * MI), entry("free_completed", low, 12 * MI)),
        entry("alloc", low, 12 * MI),
    ]
    assert replay(trace).parting is None


def test_a_retry_on_a_full_card_is_repeated() -> None:
    trace = [
        *(entry("segment_alloc", BASE, 24 * MI), entry("alloc", BASE, 24 * MI), entry("free_completed", BASE, 24 * MI)),
        *(entry("segment_alloc", BASE + 64 * MI, 2 * MI), entry("alloc", BASE + 64 * MI, 8)),
        entry("segment_free", BASE, 24 * MI),
        *(entry("segment_alloc", BASE, 30 * MI), entry("alloc", BASE, 30 * MI)),
        {"action": "oom", "size": 90 * MI, "stream": 0, "device_free": 4 * MI},
    ]
    found = replay(trace)
    assert found.parting is None
    assert [(at.entry, at.predicted // MI) for at in found.reserved] == [(1, 24), (4, 26), (5, 2), (7, 32)]


def test_a_free_that_waits_for_another_stream_holds_its_block() -> None:
    trace = [
        *(entry("segment_alloc", BASE, 12 * MI), entry("alloc", BASE, 12 * MI), entry("free_requested", BASE, 12 * MI)),
        *(entry("segment_alloc", BASE + 64 * MI, 12 * MI), entry("alloc", BASE + 64 * MI, 12 * MI)),
        entry("free_completed", BASE, 12 * MI),
        entry("alloc", BASE, 12 * MI),
    ]
    assert replay(trace).parting is None


APART = BASE + 64 * MI, BASE + 128 * MI
GRAPH_TRACE = [
    *(entry("segment_alloc", BASE, 12 * MI), entry("alloc", BASE, 12 * MI), entry("free_completed", BASE, 12 * MI)),
    # the graph has no use of what others left free
    *(entry("segment_alloc", APART[0], 12 * MI), entry("alloc", APART[0], 12 * MI)),
    entry("segment_free", BASE, 12 * MI),
    # the same address again, for the graph this time
    *(entry("segment_alloc", BASE, 20 * MI), entry("alloc", BASE, 6 * MI), entry("alloc", BASE + 6 * MI, 6 * MI)),
    *(entry("free_completed", BASE, 6 * MI), entry("free_completed", BASE + 6 * MI, 6 * MI)),
    # and others have no use of what the graph left free
    *(entry("segment_alloc", APART[1], 20 * MI), entry("alloc", APART[1], 6 * MI)),
]


def test_the_pools_of_graphs_are_known_from_the_snapshot_or_from_the_entries() -> None:
    without = replay(GRAPH_TRACE)
    assert without.parting is not None
    assert without.parting.entry == 4, "unless it is told, it takes all for one pool"

    segments = [
        {"address": BASE, "total_size": 20 * MI, "segment_pool_id": (0, 7)},
        {"address": APART[0], "total_size": 12 * MI, "segment_pool_id": (0, 7)},
        {"address": APART[1], "total_size": 20 * MI, "segment_pool_id": (0, 0)},
    ]
    assert replay(GRAPH_TRACE, segments).parting is None
    of_graph = {3, 4, *range(6, 11)}
    named = [{**at, "pool_id": [0, 7] if n in of_graph else [0, 0]} for n, at in enumerate(GRAPH_TRACE)]
    assert replay(named).parting is None


def test_a_graphs_end_gives_back_its_segments_alone() -> None:
    other = BASE + 64 * MI
    trace = [
        *(entry("segment_alloc", BASE, 12 * MI), entry("alloc", BASE, 12 * MI), entry("free_completed", BASE, 12 * MI)),
        *(entry("segment_alloc", other, 12 * MI, pool_id=GRAPH), entry("alloc", other, 12 * MI, pool_id=GRAPH)),
        entry("free_completed", other, 12 * MI, pool_id=GRAPH),
        entry("segment_free", other, 12 * MI, pool_id=GRAPH),
        entry("alloc", BASE, 12 * MI),
    ]
    assert replay(trace).parting is None


def test_a_recording_that_began_too_late_is_said_to_have() -> None:
    found = replay([entry("free_completed", BASE, 512), entry("segment_free", BASE, 2 * MI)])
    assert found.parting is not None
    assert found.parting.entry == 0
    assert "recorded too late" in found.parting.why


def test_a_trace_with_holes_is_named_and_gone_through() -> None:
    made = entry("segment_alloc", BASE, 12 * MI), entry("alloc", BASE, 12 * MI)
    freed = [entry("free_completed", BASE, 12 * MI), entry("free_completed", BASE + 12 * MI, 12 * MI)]
    found = replay([*made, entry("alloc", BASE + 12 * MI, 12 * MI), *freed])
    assert found.parting is not None
    assert found.parting.entry == 2, "the segment of the second block is not in the trace"
    found = replay([*made, *made, *freed[:1]])
    assert found.parting is not None
    assert found.parting.entry == 2
    assert "entries are missing" in found.parting.why


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_without_one_of_its_segments_always_parts_from_there_on(seed: int) -> None:
    draw, twin, live = random.Random(seed), Twin(), list[int]()
    for _ in range(250):
        if live and draw.random() < 0.5:
            twin.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(twin.allocate(random_size(draw), DEFAULT, 0))
    made = [index for index, at in enumerate(twin.trace) if at["action"] == "segment_alloc"]
    assert len(made) > 5
    for index in made:
        found = replay(twin.trace[:index] + twin.trace[index + 1 :])
        assert found.parting is not None, f"entry {index} is missing, and nobody noticed"
        assert found.parting.entry == index


def test_nothing_recorded_is_nothing_reserved() -> None:
    found = replay([])
    assert (found.reserved, found.peak_predicted, found.peak_recorded, found.parting) == ((), 0, 0, None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"segments": [], "device_traces": []}, "not the trace of a device"),
        ([[entry("alloc", BASE, 1)]], "not the trace of a device"),
        ([{"addr": 1}], "not the trace of a device"),
        ([entry("segment_map", BASE, 2 * MI)], "expandable segments"),
        ([entry("segment_unmap", BASE, 2 * MI)], "expandable segments"),
    ],
)
def test_what_cannot_be_repeated_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        replay(entries)
    assert caught.value.why
    assert caught.value.fix
