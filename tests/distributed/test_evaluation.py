"""An evaluation on 2 and 4 gloo processes is that of one process to the bit, uneven tails included."""

import math
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import RecipeError
from paceline.engine.evaluate import evaluate, inference
from paceline.seams import World
from tests.parity import driving, reference
from tests.testing.distributed import run_distributed
from tests.unit.engine.splits import METRICS, OWN, SUMS, Split, bits

SIZES = ((7, 1), (7, 2), (7, 32), (1, 1), (1, 32), (61, 4), (64, 8))
"""Samples of a split, and of a batch."""


def alone_and_together(world: World, splits: list[Split]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each split comes to in this process, and on all of them; in the same process, so on as many threads."""
    return [
        (bits(split.evaluate(batch_size)), bits(split.evaluate(batch_size, world)))
        for split in splits
        for batch_size in {batch_size for size, batch_size in SIZES if size == split.size}
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", METRICS)
def test_every_metric_of_any_number_of_samples_has_the_bits_of_one_process(kind: str, ranks: int) -> None:
    splits = [Split(kind, size) for size in sorted({size for size, _ in SIZES})]
    found = run_distributed(alone_and_together, ranks, splits)
    for rank, pairs in enumerate(found):
        assert len(pairs) == len(SIZES)
        for alone, together in pairs:
            assert together == alone, f"rank {rank}, {alone['samples']} samples"
    assert all(pairs == found[0] for pairs in found), "ranks return different records"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", METRICS)
def test_sums_alone_and_nan(kind: str, ranks: int) -> None:
    splits = [Split(kind, 61, metrics=SUMS[kind]), Split(kind, 7, broken=math.nan), Split(kind, 7, broken=math.inf)]
    for pairs in run_distributed(alone_and_together, ranks, splits):
        assert all(together == alone for alone, together in pairs)


def evaluate_distilbert(world: World, packed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's own inference on a transformer, alone and together."""
    techniques = {**driving.PLAIN, "packing": packed}
    metrics = [*METRICS["classification"], OWN]
    chosen = driving.recipe(techniques=techniques, task={"metrics": metrics})
    run = driving.assembled(reference.tiny_model(), chosen)
    ids = np.arange(reference.SAMPLES)[:59]
    alone, together = (
        bits(evaluate(run.engine.infer, run.build, "validation", ids, 8, step=3, epoch=1, **more))
        for more in ({}, {"world": world})
    )
    return alone, together


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_engine_of_a_transformer(packed: bool) -> None:
    for alone, together in run_distributed(evaluate_distilbert, 2, packed):
        assert together == alone


def broken_off(world: World) -> int:
    """Rank 1 is asked to stop before its second batch; all agree on it within ``infer``."""
    split = Split("classification", 20)
    build = split.build()
    infer, calls = inference(build), 0

    def stopped(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if world.any(world.rank == 1 and calls == 2):
            raise InterruptedError
        return infer(batch)

    with pytest.raises(InterruptedError):
        evaluate(stopped, build, "validation", np.arange(20), 2, step=0, epoch=0, world=world)
    assert bits(split.evaluate(2, world)) == bits(split.evaluate(2)), "the next evaluation is whole again"
    return calls


def test_an_evaluation_that_all_ranks_break_off_leaves_them_together() -> None:
    assert run_distributed(broken_off, 2) == [2, 2]


def failing(world: World) -> str:
    """A user's metric that raises where it is computed, on rank 0."""
    with pytest.raises(RecipeError) as raised:
        Split("regression", 5, metrics=(OWN.replace("own", "failing"),)).evaluate(2, world)
    return str(raised.value)


def test_a_users_metric_that_fails_is_told_on_every_rank() -> None:
    messages = run_distributed(failing, 2)
    assert messages[0] == messages[1]
    assert "no such column" in messages[0]
