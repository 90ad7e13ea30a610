"""Ranks share out each step's samples among themselves: nothing is lost, nobody waits long, and no rank has to be
asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.contract.errors import RecipeError
from paceline.data.order import OrderState, ShuffledOrder, StepPlan, check_world, split_evenly


def review_lengths(samples: int, seed: int = 0) -> np.ndarray:
    """Token counts like those of IMDB reviews cut at 512."""
    return np.clip(np.exp(np.random.default_rng(seed).normal(5.45, 0.62, samples)), 16, 512).astype(np.int64)


def ranks_of(order: ShuffledOrder, at: OrderState, world_size: int) -> list[StepPlan]:
    return [order.plan(at, rank, world_size) for rank in range(world_size)]


def start(batch_size: int, seed: int = 0) -> OrderState:
    return OrderState(seed=seed, epoch=0, step=0, batch_size=batch_size)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_share_the_global_batch_whatever_the_sizes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    samples, batch_size, micro = (int(draw.integers(*bounds)) for bounds in ((1, 200), (1, 70), (1, 20)))
    world_size = int(draw.integers(2, 12))
    ids = draw.permutation(1000)[:samples]
    lengths = None if seed % 4 == 0 else draw.integers(0, 600, 1000)
    alone = ShuffledOrder(ids, micro_batch_size=micro)
    order = ShuffledOrder(ids, micro_batch_size=micro, lengths=lengths)
    at = start(batch_size, seed)
    for _ in range(2 * order.steps_per_epoch(batch_size)):
        plans = ranks_of(order, at, world_size)
        expected = alone.plan(at).samples
        assert all(np.array_equal(plan.samples, expected) for plan in plans)
        split = [np.concatenate(plan.microbatches) for plan in plans]
        assert sorted(np.concatenate(split)) == sorted(expected), "a sample is lost, or given twice"
        counts = [len(share) for share in split]
        assert max(counts) - min(counts) <= 1
        assert {len(plan.microbatches) for plan in plans} == {-(-max(counts) // micro)}
        place = {sample: index for index, sample in enumerate(expected)}
        for ids_of in itertools.chain(*(plan.microbatches for plan in plans)):
            assert ids_of.dtype == np.int64
            assert len(ids_of) <= micro
            assert np.all(np.diff([place[sample] for sample in ids_of]) > 0), "not in the batch's order"
        for plan in plans:
            sizes = [len(ids_of) for ids_of in plan.microbatches]
            assert max(sizes) - min(sizes) <= 1
        at = order.after(at)


def test_one_rank_cuts_the_batch_as_it_stands_and_looks_at_no_length() -> None:
    order = ShuffledOrder(np.arange(20), micro_batch_size=3, shuffle=False, lengths=review_lengths(20))
    plan = order.plan(start(8))
    assert [list(ids) for ids in plan.microbatches] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "micro", "most", "most_in_pieces"),
    [(8, 256, 32, 1.003, 1.003), (8, 256, 8, 1.003, 1.02), (2, 16, 8, 1.03, 1.03), (8, 251, 32, 1.03, 1.03)],
)
def test_no_rank_has_much_more_tokens_than_the_mean(
    world_size: int, batch_size: int, micro: int, most: float, most_in_pieces: float
) -> None:
    lengths = review_lengths(20_000)
    order = ShuffledOrder(np.arange(len(lengths)), micro_batch_size=micro, lengths=lengths, drop_last=True)
    at, random = start(batch_size), []
    for _ in range(60):
        plans = ranks_of(order, at, world_size)
        pieces = np.array([[lengths[ids].sum() for ids in plan.microbatches] for plan in plans])
        totals = pieces.sum(axis=1)
        assert totals.max() / totals.mean() <= most, f"step {at.step}: {totals}"
        assert pieces.max() / pieces.mean() <= most_in_pieces, f"step {at.step}: {pieces}"
        # what is met at the same place of the step is fullest first
        assert np.all(np.diff(pieces, axis=1) <= 0)
        split = [lengths[plans[0].samples[rank::world_size]].sum() for rank in range(world_size)]
        random.append(max(split) / np.mean(split))
        at = order.after(at)
    assert np.mean(random) > 1.04, "a plain split would do: this test shows nothing"


def test_ranks_agree_without_a_word_whatever_they_planned_before() -> None:
    lengths = review_lengths(500)
    mine = ShuffledOrder(np.arange(500), micro_batch_size=4, lengths=lengths)
    places = [start(64)]
    for _ in range(10):
        places.append(mine.after(places[-1]))
    seen = {(index, rank): mine.plan(at, rank, 4) for index, at in enumerate(places) for rank in range(4)}
    for (index, rank), plan in reversed(seen.items()):
        fresh = ShuffledOrder(np.arange(500), micro_batch_size=4, lengths=lengths.copy()).plan(places[index], rank, 4)
        assert all(map(np.array_equal, fresh.microbatches, plan.microbatches))
        again = mine.plan(places[index], rank, 4)
        assert all(map(np.array_equal, again.microbatches, plan.microbatches))


@pytest.mark.parametrize("seed", range(25))
def test_a_resumed_run_on_fewer_ranks_takes_the_same_samples_in_the_same_steps(seed: int) -> None:
    draw = np.random.default_rng(seed)
    samples, batch_size, micro = (int(draw.integers(*bounds)) for bounds in ((30, 200), (4, 40), (1, 12)))
    lengths = review_lengths(samples, seed)
    alone = ShuffledOrder(np.arange(samples), micro_batch_size=micro)
    epochs = 3
    steps = epochs * alone.steps_per_epoch(batch_size)
    first, second = sorted(int(step) for step in draw.integers(0, steps + 1, 2))
    undisturbed, taken = start(batch_size, seed), []
    at = undisturbed
    for step in range(steps):
        world_size = 4 if step < first else 2 if step < second else 1
        if step in (0, first, second):  # another process: nothing but the state is left
            order = ShuffledOrder(np.arange(samples), micro_batch_size=micro, lengths=lengths)
            at = OrderState(**vars(at))
        plans = ranks_of(order, at, world_size)
        assert np.array_equal(plans[0].samples, alone.plan(undisturbed).samples), f"step {step} of {steps}"
        taken += np.concatenate([ids for plan in plans for ids in plan.microbatches]).tolist()
        at, undisturbed = order.after(at), alone.after(undisturbed)
    assert at == undisturbed
    for epoch in range(epochs):
        assert sorted(taken[epoch * samples : (epoch + 1) * samples]) == list(range(samples)), f"epoch {epoch}"


def test_where_samples_run_out_a_micro_batch_is_empty_and_every_rank_has_as_many() -> None:
    order = ShuffledOrder(np.arange(10), micro_batch_size=1, lengths=review_lengths(10))
    sizes = [[len(ids) for ids in plan.microbatches] for plan in ranks_of(order, start(10), 4)]
    assert sorted(sizes) == [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("lengths", [None, review_lengths(19)])
def test_the_last_batch_of_an_epoch_may_have_fewer_samples_than_ranks(lengths: np.ndarray | None) -> None:
    order = ShuffledOrder(np.arange(19), micro_batch_size=4, lengths=lengths)
    last = OrderState(seed=0, epoch=0, step=1, batch_size=16)
    sizes = [[len(ids) for ids in plan.microbatches] for plan in ranks_of(order, last, 8)]
    assert sorted(sizes) == [[0]] * 5 + [[1]] * 3


def test_without_lengths_ranks_take_turns() -> None:
    order = ShuffledOrder(np.arange(10), micro_batch_size=8, shuffle=False)
    shares = [plan.microbatches[0].tolist() for plan in ranks_of(order, start(10), 3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize(
    "lengths",
    [[0] * 9, [7] * 9, [512] + [16] * 40, [10**12, *range(30)], list(range(50)), [1], [], [2**k for k in range(12)]],
    ids=["empty texts", "equal", "one long", "enormous", "sorted", "one", "none", "powers"],
)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_odd_lengths_are_split_with_counts_within_one(lengths: list[int], parts: int) -> None:
    split = split_evenly(np.array(lengths, dtype=np.int64), parts)
    counts = np.bincount(split, minlength=parts)
    assert len(counts) == parts
    assert counts.max() - counts.min() <= 1
    assert len(split) == len(lengths)


@pytest.mark.parametrize("seed", range(30))
def test_close_to_the_best_of_all_deals(seed: int) -> None:
    lengths = review_lengths(10, seed)
    whole = lengths.sum()
    best = min(max(s, whole - s) for s in (lengths[list(half)].sum() for half in itertools.combinations(range(10), 5)))
    ours = np.bincount(split_evenly(lengths, 2), lengths).max()
    assert best <= ours <= 1.02 * best


def test_what_rounds_leave_uneven_an_exchange_mends() -> None:
    # rounds: 11 | 5, 11 + 4 | 5 + 4, 15 + 1 | 9 + 1; then a 4 goes for a 1
    lengths = np.array([11, 5, 4, 4, 1, 1], dtype=np.int64)
    assert np.bincount(split_evenly(lengths, 2), lengths).tolist() == [13, 13]
    assert np.bincount(split_evenly(lengths, 2)).tolist() == [3, 3]


def test_every_rank_needs_a_sample() -> None:
    check_world(8, 8)
    check_world(35_000, 8)
    with pytest.raises(RecipeError, match=r"4 processes, 3 training samples\n  why: .*\n  fix: start 3 processes"):
        check_world(3, 4)


@pytest.mark.parametrize("lengths", [None, review_lengths(64)])
def test_the_first_rank_sees_what_every_rank_takes_and_deals_each_step_once(
    lengths: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ShuffledOrder(np.arange(64), micro_batch_size=3, lengths=lengths)
    at, split = start(27), list[int]()
    monkeypatch.setattr(
        "paceline.data.order.split_evenly", lambda sizes, parts: split.append(parts) or split_evenly(sizes, parts)
    )
    for _ in range(5):
        order.plan(at, 0, 4)
        order.plan(order.after(at), 0, 4)  # read ahead
        seen = order.of_all_ranks(at, 4)
        expected = [ids for plan in ranks_of(order, at, 4) for ids in plan.microbatches]
        assert len(seen) == len(expected)
        assert all(map(np.array_equal, seen, expected))
        at = order.after(at)
    assert split.count(4) == 6, "the ranks' shares of a step were worked out more than once"
    assert [list(ids) for ids in order.of_all_ranks(start(27), 1)] == [
        list(i) for i in order.plan(start(27)).microbatches
    ]


@pytest.mark.parametrize("seed", range(40))
def test_ranks_with_too_little_are_left_out_where_a_sample_may_not_be_alone(seed: int) -> None:
    draw = np.random.default_rng(seed)
    world_size, micro = int(draw.integers(2, 9)), int(draw.integers(3, 12))
    batch_size = int(draw.integers(2 * world_size, 6 * world_size))
    samples = int(draw.integers(2, 3 * batch_size))
    order = ShuffledOrder(
        np.arange(samples), micro_batch_size=micro, lengths=review_lengths(samples) if seed % 2 else None, fewest=2
    )
    at, smallest = start(batch_size, seed), order.smallest(batch_size, world_size)
    for _ in range(order.steps_per_epoch(batch_size)):
        plans = ranks_of(order, at, world_size)
        sizes = [[len(ids) for ids in plan.microbatches] for plan in plans]
        assert sorted(np.concatenate([i for p in plans for i in p.microbatches])) == sorted(plans[0].samples)
        assert len({len(row) for row in sizes}) == 1, "ranks would not meet"
        assert max(map(max, sizes)) <= micro
        taken = [size for row in sizes for size in row if size]
        assert min(taken) >= 2 or len(plans[0].samples) == 1, sizes
        assert min(taken) == order.smallest(len(plans[0].samples), world_size, batch_size)
        if len(plans[0].samples) == batch_size:
            assert min(taken) == smallest
            assert all(map(sum, sizes)), "a rank got nothing of a whole batch"
        at = order.after(at)


@pytest.mark.parametrize(
    ("batch_size", "micro", "world_size", "smallest"),
    [(7, 3, 1, 1), (8, 3, 1, 2), (8, 8, 1, 8), (4, 4, 4, 1), (5, 8, 4, 1), (8, 8, 4, 2), (7, 2, 2, 1), (3, 8, 4, 1)],
)
def test_the_smallest_micro_batch_is_known_beforehand(
    batch_size: int, micro: int, world_size: int, smallest: int
) -> None:
    order = ShuffledOrder(np.arange(40), micro_batch_size=micro, fewest=2)
    assert order.smallest(batch_size, world_size) == smallest
    plans = ranks_of(order, start(batch_size), world_size)
    assert min(len(ids) for plan in plans for ids in plan.microbatches if len(ids)) == smallest
