"""Seeding leaves no trace but the generators' state."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from paceline.engine.rng import augmentation_seed, generators, micro_batch_seed


def test_the_generators_are_those_that_dropout_draws_from() -> None:
    (own,) = generators(torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        own.manual_seed(micro_batch_seed(1, 2, 3))
        drawn = torch.rand(5)
        torch.manual_seed(micro_batch_seed(1, 2, 3))
        assert torch.equal(drawn, torch.rand(5))


def test_augmentation_and_dropout_draw_from_different_streams() -> None:
    assert augmentation_seed(1, 2, 3) != micro_batch_seed(1, 2, 3)
    assert len({augmentation_seed(0, step, part) for step in range(20) for part in range(3)}) == 60


def test_every_forward_pass_has_a_seed_of_its_own_and_the_documented_one() -> None:
    places = list(itertools.product(range(3), range(4), range(3), range(2)))
    for seed_of in (micro_batch_seed, augmentation_seed):
        assert len({seed_of(*place) for place in places}) == len(places)
    drawn = np.random.SeedSequence((1, 2, 3, 4)).generate_state(1, np.uint64)[0]
    assert micro_batch_seed(1, 2, 3, 4) == int(drawn), "resumed runs would draw other dropout than they began with"
