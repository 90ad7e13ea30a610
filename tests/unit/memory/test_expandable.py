"""Expandable segments: as torch reserved them on a GPU, and the laws that any order of calls keeps."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.memory.expandable import ExpandableAllocator, Stretch, ask_for_it

MIB = 2**20


def test_a_run_on_a_gpu_is_repeated() -> None:
    """Events: ``[size, stream]`` is allocated, a number frees that allocation, null empties the cache."""
    run = json.loads(gzip.decompress((Path(__file__).parent / "expandable_h200.json.gz").read_bytes()))
    allocator, made = ExpandableAllocator(), list[Stretch]()
    for event in run["events"]:
        if event is None:
            allocator.empty_cache()
        elif isinstance(event, int):
            allocator.free(made[event])
        else:
            size, stream = event
            made.append(allocator.allocate(size, pool="graphs" if stream else (0, 0), stream=stream))
    assert allocator.peak_allocated == run["peak_allocated"]
    assert abs(allocator.peak_reserved - run["peak_reserved"]) <= 2 * MIB, "a page for small blocks"


def test_a_segment_grows_by_its_pages() -> None:
    allocator = ExpandableAllocator()
    allocator.allocate(3 * MIB)
    assert (allocator.allocated, allocator.reserved) == (3 * MIB, 20 * MIB)
    allocator.allocate(18 * MIB)
    assert allocator.reserved == 40 * MIB, "the 17 MiB that were left are its beginning"
    allocator.allocate(100)
    assert (allocator.allocated, allocator.reserved) == (21 * MIB + 512, 42 * MIB)


def test_what_is_a_little_larger_grows_and_leaves_no_pieces() -> None:
    allocator = ExpandableAllocator()
    for size in range(100, 120, 3):
        allocator.free(allocator.allocate(size * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (118 * MIB, 120 * MIB)


def test_a_free_stretch_is_taken_before_the_one_that_can_grow() -> None:
    allocator = ExpandableAllocator()
    first, wall, last = (allocator.allocate(size * MIB) for size in (30, 2, 20))
    allocator.free(first)
    allocator.free(last)
    assert allocator.allocate(20 * MIB).address == 0, "20 MiB would fit the end exactly, which may be needed to grow"
    allocator.free(wall)


def test_emptying_the_cache_gives_back_whole_pages_within_a_segment() -> None:
    allocator = ExpandableAllocator()
    blocks = [allocator.allocate(30 * MIB) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved == 100 * MIB, "30 to 60 hold one page, from 40 to 60"
    again = allocator.allocate(30 * MIB)
    assert (again.address, allocator.reserved) == (30 * MIB, 120 * MIB), "and get it back"


def test_pools_and_streams_share_nothing_and_private_pools_keep_what_they_have() -> None:
    allocator = ExpandableAllocator()
    for pool, stream in (((0, 0), 0), ("graphs", 0), ("graphs", 7)):
        allocator.free(allocator.allocate(20 * MIB, pool, stream))
    assert allocator.reserved == 60 * MIB
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved) == (40 * MIB, 60 * MIB)


def test_a_block_is_freed_once() -> None:
    allocator = ExpandableAllocator()
    block = allocator.allocate(MIB)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(block)
    allocator.free(allocator.allocate(0))


@pytest.mark.parametrize("seed", range(8))
def test_at_random_blocks_never_overlap_and_pages_cover_them(seed: int) -> None:
    draw, allocator, live = random.Random(seed), ExpandableAllocator(), list[tuple[Any, Stretch]]()
    for _ in range(600):
        if live and draw.random() < 0.45:
            allocator.free(live.pop(draw.randrange(len(live)))[1])
        elif draw.random() < 0.03:
            allocator.empty_cache()
        else:
            where = (draw.choice([(0, 0), "graphs"]), draw.choice([0, 1]))
            size = draw.choice([draw.randint(1, MIB), draw.randint(MIB, 90 * MIB)])
            live.append(((*where, size <= MIB), allocator.allocate(size, *where)))
        assert allocator.allocated == sum(block.size for _, block in live) <= allocator.reserved
        pages = set()
        for arena in {arena for arena, _ in live}:
            page = (2 if arena[2] else 20) * MIB
            spans = sorted((b.address, b.address + b.size) for a, b in live if a == arena)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "they overlap"
            pages |= {(arena, n, page) for first, end in spans for n in range(first // page, -(-end // page))}
        assert allocator.reserved >= sum(page for *_, page in pages), "a block without memory"
    for _, block in live:
        allocator.free(block)
    assert allocator.allocated == 0


def test_torch_is_asked_for_it_unless_somebody_else_has_set_it_up() -> None:
    nothing: dict[str, str] = {}
    ask_for_it(nothing)
    assert nothing == ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if sys.platform == "linux" else {})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        theirs = {name: "max_split_size_mb:128"}
        ask_for_it(theirs)
        assert theirs == {name: "max_split_size_mb:128"}
