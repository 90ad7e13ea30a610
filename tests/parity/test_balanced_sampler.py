"""``loop.sampler: balanced`` beside torch's ``WeightedRandomSampler``; the same samples on any number of ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from paceline.contract.errors import RecipeError
from paceline.data.order import OrderState, ShuffledOrder
from paceline.data.sampler import sampling_weights
from paceline.recipe.entries import value_of
from paceline.recipe.rules import check_kind
from tests.parity.losses import assert_no_split_matters, chosen, rare, train

LABELS = np.repeat([0, 1, 3], [900, 90, 10])
"""No sample has class 2, which a model's head may know all the same."""


def order() -> ShuffledOrder:
    return ShuffledOrder(np.arange(1000) + 5, micro_batch_size=8, weights=sampling_weights(LABELS))


def epoch(number: int, seed: int = 0) -> np.ndarray:
    at = OrderState(seed=seed, epoch=number, step=0, batch_size=32)
    return np.concatenate(list(order().microbatches(at, 32)))


def test_classes_are_drawn_as_torchs_sampler_draws_them() -> None:
    ours = np.concatenate([LABELS[epoch(number) - 5] for number in range(30)])
    torch.manual_seed(0)
    theirs = LABELS[list(WeightedRandomSampler(sampling_weights(LABELS).tolist(), 30_000))]
    for found in (ours, theirs):
        shares = np.bincount(found, minlength=4) / len(found)
        np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.012)  # four deviations


def test_within_a_class_every_sample_is_as_likely() -> None:
    counts = np.bincount(np.concatenate([epoch(number) - 5 for number in range(60)]), minlength=1000)
    rare_ones = counts[LABELS == 3]
    assert rare_ones.min() > 0.9 * rare_ones.mean(), "one of ten samples is left behind"
    assert rare_ones.max() < 1.1 * rare_ones.mean()


def test_an_epoch_has_as_many_samples_and_no_two_are_alike() -> None:
    assert len(epoch(0)) == 1000
    assert not np.array_equal(epoch(0), epoch(1))
    assert not np.array_equal(epoch(0), epoch(0, seed=1))
    assert torch.equal(torch.from_numpy(epoch(1)), torch.from_numpy(epoch(1))), "the order is no function of its place"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_out_what_one_draws(world_size: int) -> None:
    at = OrderState(seed=3, epoch=1, step=4, batch_size=32)
    alone = np.sort(order().plan(at).samples)
    shares = [np.concatenate(order().plan(at, rank, world_size).microbatches) for rank in range(world_size)]
    assert np.array_equal(np.sort(np.concatenate(shares)), alone)


def test_no_split_matters() -> None:
    assert_no_split_matters("classification", loop={"sampler": "balanced"})


def test_a_run_sees_rare_samples_more_often() -> None:
    """The losses are those of the samples that are drawn, not of every sample once."""
    assert train(chosen(loop={"sampler": "balanced"}))[0] != train(chosen())[0]
    weights = sampling_weights(rare())
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize(("kind", "way_on"), [("multi_label", "task.class_weights=balanced"), ("regression", "null")])
def test_samples_without_one_class_are_refused(kind: str, way_on: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check_kind(kind, partial(value_of, chosen(loop={"sampler": "balanced"})))
    assert way_on in str(raised.value)
    check_kind(kind, partial(value_of, chosen()))
