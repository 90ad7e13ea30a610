"""Seeding leaves no trace but the generators' state."""

from __future__ import annotations

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
