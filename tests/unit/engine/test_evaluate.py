"""An evaluation on several ranks, here threads, is that of one process to the bit; tests/distributed has processes."""

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.contract.errors import RecipeError
from paceline.engine.evaluate import evaluate, inference, largest_batch
from paceline.seams import Alone
from tests.unit.engine.splits import METRICS, OWN, SUMS, Split, bits
from tests.unit.tasks.ranks import ThreadWorld, on_ranks

KINDS = list(METRICS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "batch_size", "ranks"), [(7, 2, 4), (7, 1, 4), (7, 32, 4), (1, 32, 4), (1, 1, 2), (61, 4, 3), (64, 8, 2)]
)
def test_n_ranks_return_what_one_returns(kind: str, size: int, batch_size: int, ranks: int) -> None:
    split = Split(kind, size)
    alone = bits(split.evaluate(batch_size))
    found = on_ranks(ranks, lambda world: split.evaluate(batch_size, world))
    assert [bits(record) for record in found] == [alone] * ranks
    assert len({record.seconds for record in found}) == 1, "the time is to be that of the slowest rank, on all"


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_measures_what_it_always_did(kind: str) -> None:
    split = Split(kind, 40)
    build = split.build()
    record = split.evaluate(7)
    batch = build.layout.collate(np.arange(40))
    logits = inference(build)(batch)
    mean = {
        "classification": lambda: F.cross_entropy(logits, batch.labels),
        "multi_label": lambda: F.binary_cross_entropy_with_logits(logits, batch.labels),
        "regression": lambda: F.mse_loss(logits[:, 0], batch.labels),
    }[kind]()
    assert record.loss == pytest.approx(mean.item(), rel=1e-6)
    meter = build.task.meter(build.device)
    meter.update(logits, batch)
    whole = meter.compute()
    for name in METRICS[kind]:
        assert record.metrics[name] == pytest.approx(whole[name], rel=1e-5), name
    assert list(record.metrics) == [*METRICS[kind], OWN.rpartition(":")[2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_stays_nan_on_every_rank(kind: str, broken: float) -> None:
    split = Split(kind, 9, broken=broken)
    alone = split.evaluate(2)
    found = on_ranks(3, lambda world: split.evaluate(2, world))
    assert [bits(record) for record in found] == [bits(alone)] * 3
    if math.isnan(broken):
        of_scores = {"auroc", "pearson", "spearman"} & set(METRICS[kind])
        assert all(math.isnan(alone.metrics[name]) for name in of_scores), "NaN has no rank among the scores"
        assert math.isnan(alone.loss)


def test_a_split_without_samples_is_nan_and_runs_nothing() -> None:
    split = Split("regression", 0)
    alone = split.evaluate(4)
    assert math.isnan(alone.loss)
    assert math.isnan(alone.metrics["pearson"])
    assert math.isnan(alone.metrics["own_metric"])
    assert [bits(record) for record in on_ranks(2, lambda world: split.evaluate(4, world))] == [bits(alone)] * 2


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64])
def test_every_rank_runs_equally_often_and_every_sample_is_run(size: int) -> None:
    split = Split("classification", size)

    def one(world: ThreadWorld) -> tuple[int, set[int]]:
        build, widths = split.build(), set()
        infer = inference(build)
        calls = 0

        def counted(batch):
            nonlocal calls
            calls += 1
            world.any(False)  # as the layers of a sharded model do: a collective in every pass
            widths.update(batch.inputs["attention_mask"].sum(1).tolist())
            return infer(batch)

        record = evaluate(counted, build, "test", np.arange(size), 2, step=0, epoch=0, world=world)
        assert record.samples == size
        return calls, widths

    found = on_ranks(4, one)
    assert {calls for calls, _ in found} == {math.ceil(math.ceil(size / 2) / 4)}
    lengths = np.diff(split.build().layout._tokens.offsets)
    assert set().union(*(widths for _, widths in found)) == set(lengths.tolist())


def test_the_largest_batch_may_be_the_tests() -> None:
    """Of a plan that looks at the validation split alone: the test split may have more texts, and longer ones."""
    layout = Split("classification", 40).build().layout
    by_slots = sorted(range(40), key=lambda row: layout.size(np.array([row])).slots)
    short, long = np.sort(by_slots[:10]), np.sort(by_slots[10:])
    most = layout.size(np.array(by_slots[-4:])).slots
    for splits in ({"validation": short, "test": long}, {"validation": long, "test": short}, {"test": long}):
        found = largest_batch(layout, {"train": np.arange(40), **splits}, 4)
        assert found is not None
        assert (len(found), layout.size(found).slots) == (4, most)
    assert largest_batch(layout, {"train": np.arange(40)}, 4) is None


def test_ranks_get_batches_of_like_slots() -> None:
    split = Split("classification", 400)

    def one(world: ThreadWorld) -> int:
        build, slots = split.build(), 0
        infer = inference(build)

        def counted(batch):
            nonlocal slots
            slots += batch.inputs["input_ids"].numel()
            return infer(batch)

        evaluate(counted, build, "test", np.arange(400), 5, step=0, epoch=0, world=world)
        return slots

    slots = on_ranks(4, one)
    assert max(slots) / (sum(slots) / 4) < 1.03, slots


@pytest.mark.parametrize("kind", KINDS)
def test_without_metrics_of_scores_no_scores_are_sent(kind: str) -> None:
    def sent(size: int) -> list[int]:
        split = Split(kind, size, metrics=SUMS[kind])

        def one(world: ThreadWorld) -> int:
            split.evaluate(8, world)
            return sum(world.sent)

        return on_ranks(2, one)

    # one row of fp64 a batch: loss, labels, and what regression adds up
    states = 2 + (5 if kind == "regression" else 0)
    assert sent(80)[0] - sent(40)[0] == 5 * 8 * states


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_without_metrics_of_scores_a_meter_keeps_none(kind: str) -> None:
    build = Split(kind, 64, classes=10, metrics=SUMS[kind]).build()
    batch = build.layout.collate(np.arange(64))
    logits = inference(build)(batch)

    def held() -> list[torch.Tensor]:
        gc.collect()
        return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]

    def grown(meter) -> int:
        meter.update(logits, batch)
        # what other tests left behind may go meanwhile, and may have no size: a compiler's tensors have letters for it
        before = {id(each) for each in held()}
        for _ in range(50):
            meter.update(logits, batch)
        return sum(each.nbytes for each in held() if id(each) not in before)

    meter = build.task.meter(build.device)
    # and the last batch's scalars, in place of the one's before
    assert grown(meter) <= 50 * 8 * 10 + 64, "a meter of sums grows by a row of numbers a batch"
    hungry = Split(kind, 64, classes=10, metrics=(OWN,)).build().task.meter(build.device)
    assert grown(hungry) >= 50 * logits.nbytes, "this test would not see scores that are kept"


def test_a_users_metric_that_fails_fails_on_every_rank() -> None:
    split = Split("classification", 9, metrics=(OWN.replace("own", "failing"),))

    def one(world: ThreadWorld) -> str:
        with pytest.raises(RecipeError) as raised:
            split.evaluate(2, world)
        return str(raised.value)

    messages = on_ranks(3, one)
    assert len(set(messages)) == 1
    assert "no such column" in messages[0]
    assert "failing_metric" in messages[0]


def test_what_ranks_agree_on_inside_infer_breaks_all_of_them_off() -> None:
    split = Split("classification", 20)

    class BrokenOff(Exception):
        pass

    def one(world: ThreadWorld) -> int:
        build = split.build()
        infer = inference(build)
        calls = 0

        def stopped(batch):
            nonlocal calls
            calls += 1
            if world.any(world.rank == 2 and calls == 3):
                raise BrokenOff
            return infer(batch)

        with pytest.raises(BrokenOff):
            evaluate(stopped, build, "test", np.arange(20), 1, step=0, epoch=0, world=world)
        return calls

    assert on_ranks(4, one) == [3] * 4


def test_a_meter_can_be_read_twice_and_go_on() -> None:
    split = Split("regression", 12)
    build = split.build()
    infer, meter = inference(build), build.task.meter(build.device)
    batches = [build.layout.collate(ids) for ids in np.split(np.arange(12), 2)]
    meter.update(infer(batches[0]), batches[0])
    half = meter.compute()
    assert meter.compute() == half
    meter.update(infer(batches[1]), batches[1])
    fresh = build.task.meter(build.device)
    for batch in batches:
        fresh.update(infer(batch), batch)
    assert meter.compute() == fresh.compute() != half


@pytest.mark.parametrize("kind", KINDS)
def test_filler_counts_on_no_rank(kind: str) -> None:
    build = Split(kind, 6).build()
    infer = inference(build)
    whole = build.layout.collate(np.arange(6))

    def one(world: ThreadWorld | Alone) -> dict[str, float]:
        meter = build.task.meter(build.device)
        # four samples and two of filler, then the other two and filler
        for place in range(world.rank, 2, world.size):
            real = torch.zeros(6)
            real[slice(4) if place == 0 else slice(4, None)] = 1
            batch = replace(whole, weights=real)
            meter.update(infer(whole), batch)
        meter.merge(world, list(range(world.rank, 2, world.size)))
        return meter.compute() if world.is_first else {}

    alone = build.task.meter(build.device)
    for ids in (np.arange(4), np.arange(4, 6)):
        batch = build.layout.collate(ids)
        alone.update(infer(whole)[ids], batch)
    expected = alone.compute()
    assert one(Alone()) == expected
    assert on_ranks(2, one)[0] == expected
    assert on_ranks(3, one)[0] == expected
