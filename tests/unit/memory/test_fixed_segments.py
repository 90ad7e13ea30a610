"""The benchmarks' copy of torch's allocator without expandable segments: its rules, with figures worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.fixed_segments import FixedSegments

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("asked", "allocated", "segment"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # the rounded size decides
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would be left, which is too little to split
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (36 * MIB, 36 * MIB, 36 * MIB),
    ],
)
def test_sizes_and_segments_are_torchs(asked: int, allocated: int, segment: int) -> None:
    allocator = FixedSegments()
    block = allocator.allocate(asked)
    assert (block.size, allocator.allocated, allocator.reserved) == (allocated, allocated, segment)
    allocator.free(block)
    assert (allocator.allocated, allocator.peak_allocated) == (0, allocated)


def test_the_smallest_block_that_fits_is_taken_and_small_ones_keep_to_themselves() -> None:
    allocator = FixedSegments()
    blocks = [allocator.allocate(size * MIB) for size in (12, 16, 14, 14)]
    places = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert [allocator.allocate(13 * MIB).address for _ in range(3)] == [places[2], places[3], places[1]]
    assert allocator.reserved == 56 * MIB, "nothing had to be asked for"
    allocator.allocate(KIB)
    assert allocator.reserved == 58 * MIB, "a small block has a segment of its own"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_join_in_any_order(order: tuple[int, ...]) -> None:
    allocator = FixedSegments()
    blocks = [allocator.allocate(5 * MIB) for _ in range(3)]
    start = blocks[0].address
    for number in order:
        allocator.free(blocks[number])
    assert (allocator.allocate(20 * MIB).address, allocator.reserved) == (start, 20 * MIB)


def test_blocks_of_two_segments_never_join() -> None:
    allocator = FixedSegments()
    first, second = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 70 * MIB
