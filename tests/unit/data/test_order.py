import numpy as np
import pytest

from paceline.data.order import OrderState, ShuffledOrder


def steps(order: ShuffledOrder, count: int, batch_size: int = 4, start: OrderState | None = None):
    at = start or OrderState(seed=5, epoch=0, step=0, batch_size=batch_size)
    for _ in range(count):
        yield at, order.plan(at)
        at = order.after(at)


def test_every_sample_once_an_epoch_and_another_order_the_next() -> None:
    ids = np.arange(100, 110)
    order = ShuffledOrder(ids, micro_batch_size=4)
    assert order.steps_per_epoch(4) == 3
    found = [plan.samples for _, plan in steps(order, 6)]
    first, second = np.concatenate(found[:3]), np.concatenate(found[3:])
    assert sorted(first) == sorted(second) == list(ids)
    assert list(first) != list(second)
    assert [len(f) for f in found] == [4, 4, 2, 4, 4, 2]


def test_a_plan_depends_on_its_state_alone() -> None:
    ids = np.arange(10)
    whole = list(steps(ShuffledOrder(ids, micro_batch_size=4), 6))
    for at, plan in reversed(whole):
        fresh = ShuffledOrder(ids, micro_batch_size=4).plan(at)
        assert list(fresh.samples) == list(plan.samples)


def test_another_seed_is_another_order_in_every_epoch() -> None:
    order = ShuffledOrder(np.arange(20), micro_batch_size=20)

    def samples(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(order.plan(OrderState(seed=seed, epoch=epoch, step=0, batch_size=20)).samples.tolist())

    orders = {samples(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert samples(0, 0) == tuple(np.random.default_rng((0, 0)).permutation(20).tolist()), "the documented order"


@pytest.mark.parametrize(("micro", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (9, [7])])
def test_micro_batches_cut_the_batch_without_loss(micro: int, sizes: list[int]) -> None:
    _, plan = next(steps(ShuffledOrder(np.arange(20), micro_batch_size=micro), 1, batch_size=7))
    assert [len(m) for m in plan.microbatches] == sizes
    assert list(np.concatenate(plan.microbatches)) == list(plan.samples)


def test_drop_last_and_no_shuffle() -> None:
    order = ShuffledOrder(np.arange(10), micro_batch_size=4, shuffle=False, drop_last=True)
    assert [list(plan.samples) for _, plan in steps(order, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert ShuffledOrder(np.arange(3), micro_batch_size=4, drop_last=True).steps_per_epoch(4) == 0
