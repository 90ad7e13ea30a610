"""The order of a pipeline's passes, and where its stages begin."""

from __future__ import annotations

import itertools

import pytest

from paceline.strategies.pipeline.find import balanced
from paceline.strategies.pipeline.schedule import CHUNKS, bubble, in_flight, passes_of

SCHEDULES = list(CHUNKS)


def carried_out(schedule: str, ranks: int, count: int) -> tuple[int, list[tuple[str, list[int]]]]:
    """How long a step takes where every pass takes 1 and messages nothing, and what goes over each way in which order.

    Raises:
        AssertionError: ranks wait for each other.
    """
    orders = [passes_of(schedule, rank, ranks, count) for rank in range(ranks)]
    done: dict[tuple[bool, int, int], int] = {}
    clocks, sent, received = [0] * ranks, dict[str, list[int]](), dict[str, list[int]]()
    last = ranks * CHUNKS[schedule] - 1
    while any(orders):
        before = len(done)
        for rank, order in enumerate(orders):
            while order:
                one = order[0]
                stage = one.chunk * ranks + rank
                source = stage - 1 if one.is_forward else stage + 1
                needed = [] if not 0 <= source <= last else [(one.is_forward, source, one.microbatch)]
                needed += [] if one.is_forward else [(True, stage, one.microbatch)]
                if not all(key in done for key in needed):
                    break
                clocks[rank] = max(clocks[rank], *(done[key] for key in needed), 0) + 1
                done[one.is_forward, stage, one.microbatch] = clocks[rank]
                order.pop(0)
                # the way: direction, the two ranks, and whether it goes around
                if 0 <= source <= last:
                    way = f"{one.is_forward} {source % ranks}-{rank} {source // ranks != one.chunk}"
                    received.setdefault(way, []).append(one.microbatch * 100 + max(source, stage))
                to = stage + 1 if one.is_forward else stage - 1
                if 0 <= to <= last:
                    way = f"{one.is_forward} {rank}-{to % ranks} {to // ranks != one.chunk}"
                    sent.setdefault(way, []).append(one.microbatch * 100 + max(to, stage))
        assert len(done) > before, f"{schedule}, {ranks} ranks, {count} micro-batches: ranks wait for each other"
    assert sent == received, f"{schedule}, {ranks} ranks, {count} micro-batches: messages overtake each other"
    return max(clocks), sorted(sent.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_waits_for_ever_and_no_message_overtakes_another(schedule: str) -> None:
    for ranks, count in itertools.product(range(2, 7), range(1, 14)):
        carried_out(schedule, ranks, count)
        for rank in range(ranks):
            order = passes_of(schedule, rank, ranks, count)
            assert len(set(order)) == len(order) == 2 * CHUNKS[schedule] * count


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 4), (4, 12), (3, 9)])
def test_a_step_waits_as_long_as_is_told(schedule: str, ranks: int, count: int) -> None:
    busy = 2 * CHUNKS[schedule] * count
    found, _ = carried_out(schedule, ranks, count)
    assert (found - busy) / found == pytest.approx(bubble(schedule, ranks, count))


def test_1f1b_keeps_few_activations_and_gpipe_all() -> None:
    assert [in_flight("1f1b", rank, 4, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight("gpipe", rank, 4, 16) for rank in range(4)] == [16] * 4


@pytest.mark.parametrize(
    ("costs", "stages", "firsts"),
    [
        ([1] * 12, 4, [0, 3, 6, 9]),
        ([1] * 5, 2, [0, 2]),  # the first keeps the activations of most micro-batches
        ([4, 1, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 9], 3, [0, 1, 3]),
        ([3, 2], 2, [0, 1]),
    ],
)
def test_the_most_expensive_stage_is_as_cheap_as_can_be(costs: list[int], stages: int, firsts: list[int]) -> None:
    assert balanced(costs, stages) == firsts
