"""The largest micro-batch: always traced, close to the truth, in a few traces."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.contract.records import MemoryPlan
from paceline.memory.search import MOST_TRACES, LargestMicroBatch, largest_micro_batch, usable_bytes
from tests.unit.memory.plans import GIB, MIB, memory_plan

Total = Callable[[int], int]


class Traces:
    """Plans whose total is a function of the size, and the sizes that were asked for."""

    def __init__(self, total: Total, refused: tuple[int, ...] = ()) -> None:
        self.total, self.refused, self.sizes = total, refused, list[int]()

    def __call__(self, samples: int) -> MemoryPlan | None:
        assert samples not in self.sizes, f"{samples} was traced before"
        self.sizes.append(samples)
        return None if samples in self.refused else memory_plan(self.total(samples), samples=samples)


def search(traces: Traces, limit: int, most: int = 32, start: int | None = None) -> LargestMicroBatch:
    found = largest_micro_batch(traces, start=start or most, most=most, limit_bytes=limit)
    told = f"{found}, traced {traces.sizes}"
    assert len(traces.sizes) <= MOST_TRACES, told
    if found.samples:
        assert found.plan is not None
        assert found.plan.samples == found.samples in traces.sizes, told
        assert found.plan.total <= limit, told
    else:
        assert found.plan is None, told
        assert 1 in traces.sizes, f"that nothing fits is a claim about the smallest: {told}"
    if found.too_large is not None:
        assert found.too_large in traces.sizes, told
        assert traces.total(found.too_large) > limit, told
        assert found.samples < found.too_large, told
    return found


def line(a_sample: int, rest: int = 5 * GIB) -> Total:
    return lambda samples: rest + samples * a_sample


@pytest.mark.parametrize("start", [1, 2, 13, 14, 20, 31, 32])
def test_a_straight_line_is_crossed_to_the_sample(start: int) -> None:
    traces = Traces(line(GIB))
    found = search(traces, limit=18 * GIB + MIB, start=start)
    assert found.samples == 13, f"traced {traces.sizes}"
    assert found.too_large in (14, 15), "one sample more is not worth a trace"
    assert len(traces.sizes) <= 5, traces.sizes


def test_the_limit_itself_fits() -> None:
    assert search(Traces(line(GIB)), limit=18 * GIB).samples == 13
    assert search(Traces(line(GIB)), limit=18 * GIB - 1).samples == 12


def test_a_whole_batch_that_fits_is_traced_once() -> None:
    traces = Traces(line(GIB))
    found = search(traces, limit=37 * GIB)
    assert (found.samples, found.too_large, traces.sizes) == (32, None, [32])


def test_a_smaller_start_goes_on_to_the_whole_batch() -> None:
    traces = Traces(line(GIB))
    found = search(traces, limit=37 * GIB, start=4)
    assert (found.samples, found.too_large, traces.sizes) == (32, None, [4, 32])


def test_where_nothing_fits_a_single_sample_was_tried() -> None:
    traces = Traces(line(GIB))
    found = search(traces, limit=6 * GIB - 1)
    assert (found.samples, found.too_large, found.plan) == (0, 1, None)
    traces = Traces(lambda _: 8 * GIB)
    assert search(traces, limit=6 * GIB, most=64).samples == 0, "a flat line has no crossing"


def test_a_batch_of_one_needs_no_search() -> None:
    assert search(Traces(line(GIB)), limit=6 * GIB, most=1).samples == 1
    assert search(Traces(line(GIB)), limit=6 * GIB - 1, most=1) == LargestMicroBatch(samples=0, too_large=1, plan=None)


def test_the_whole_batch_in_one_is_no_guide_to_its_pieces() -> None:
    """As measured by traces of BERT-large: what is accumulated is held twice, once eager and once captured."""
    totals = {1: 13.41, 2: 13.44, 3: 13.4, 4: 13.73, 5: 15.4, 6: 17.19, 7: 18.92, 8: 20.57, 10: 24.11, 12: 27.32}
    totals |= {16: 34.34, 32: 41.27}
    traces = Traces(lambda samples: int(totals[samples] * GIB))
    found = search(traces, limit=int(15.68 * GIB))
    assert (found.samples, found.too_large) == (5, 6), traces.sizes


@pytest.mark.parametrize("limit", range(6, 38))
def test_memory_that_is_flat_at_first(limit: int) -> None:
    """Up to 8 samples the peak is in the checks before the first step."""
    traces = Traces(lambda samples: max(13 * GIB, 5 * GIB + samples * GIB))
    found = search(traces, limit=limit * GIB)
    assert found.samples == (min(limit - 5, 32) if limit >= 13 else 0), traces.sizes


@pytest.mark.parametrize("step", [2 * MIB, 20 * MIB, 200 * MIB])
@pytest.mark.parametrize("most", [8, 32, 512])
def test_steps_of_the_allocator_do_not_lead_far_astray(step: int, most: int) -> None:
    def total(samples: int) -> int:
        return -(-(3 * GIB + samples * 173 * MIB) // step) * step

    for wanted in range(1, most + 1, max(1, most // 16)):
        traces = Traces(total)
        limit = total(wanted)
        largest = max(size for size in range(1, most + 1) if total(size) <= limit)
        found = search(traces, limit=limit, most=most)
        assert found.samples >= min(0.9 * largest, largest - 1), f"{largest} would fit; traced {traces.sizes}"


def test_any_growing_memory_ends_with_a_size_that_fits() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        most = drawn.choice([2, 3, 7, 32, 100, 1000])
        totals = [GIB]
        for _ in range(most):
            totals.append(totals[-1] + drawn.choice([0, 0, MIB, 50 * MIB, 2 * GIB]))
        limit = drawn.randint(totals[1], totals[-1])
        found = search(Traces(totals.__getitem__), limit, most, start=drawn.randint(1, most))
        assert found.samples >= 1 or found.too_large is not None


def test_sizes_that_are_refused_are_passed_over() -> None:
    traces = Traces(line(GIB), refused=(1,))
    assert search(traces, limit=7 * GIB).samples == 2, traces.sizes
    traces = Traces(line(GIB), refused=(1,))
    found = search(traces, limit=6 * GIB)
    assert (found.samples, found.too_large) == (0, 2), "none fits: one by itself is refused"
    traces = Traces(line(GIB), refused=(13, 31))
    assert search(traces, limit=18 * GIB).samples == 12, traces.sizes


def test_where_every_other_size_is_refused_the_smallest_was_tried() -> None:
    traces = Traces(line(GIB), refused=tuple(range(1, 32)))
    found = search(traces, limit=7 * GIB)
    assert (found.samples, found.too_large) == (0, 32), traces.sizes
    traces = Traces(line(GIB), refused=tuple(range(5, 32)))
    assert search(traces, limit=9 * GIB).samples == 4, traces.sizes


def test_where_every_size_is_refused_nothing_is_said_to_fit() -> None:
    found = largest_micro_batch(lambda _: None, start=32, most=32, limit_bytes=GIB)
    assert found == LargestMicroBatch(samples=0, too_large=None, plan=None)


def test_a_start_outside_the_batch_is_a_bug() -> None:
    for start in (0, 33):
        with pytest.raises(ValueError, match="between 1 and 32"):
            largest_micro_batch(Traces(line(GIB)), start=start, most=32, limit_bytes=GIB)


def test_two_percent_are_left_to_the_driver_and_two_to_the_prediction() -> None:
    assert usable_bytes(102 * GIB) == 98 * GIB
    assert usable_bytes(52) == 49, "rounded down"
