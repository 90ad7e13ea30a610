"""CutMix is the paper's formula over the global batch, whoever computes which part of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data.mixing import draw, mixed
from paceline.recipe.parts import AugmentPart
from tests.distributed.splitting import furthest
from tests.parity.mixing import SIZE, by_engine, by_hand, cutmix, mixup, recipe, shares
from tests.testing.distributed import run_distributed


def drawn(images: Tensor, step: int) -> tuple[Tensor, float]:
    generator = np.random.default_rng((0, step, 0, 0, 3))
    share, row = generator.beta(1.0, 1.0), int(generator.integers(SIZE))
    return cutmix(images, share, row, int(generator.integers(SIZE)))


@pytest.mark.parametrize("micro", [None, 3], ids=["one", "several"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_epochs_are_those_of_a_plain_loop(ranks: int, micro: int | None) -> None:
    chosen = recipe({"cutmix": 1.0}, micro)
    expected, told = by_hand(chosen, drawn)
    for found, losses in run_distributed(by_engine, ranks, chosen):
        assert furthest(found, expected) < 1e-5
        assert losses == pytest.approx(told, rel=1e-5)


def test_with_mixup_each_has_every_second_step() -> None:
    def either(images: Tensor, step: int) -> tuple[Tensor, float]:
        generator = np.random.default_rng((0, step, 0, 0, 3))
        if generator.random() >= 0.5:
            return mixup(images, generator.beta(0.4, 0.4))
        share, row = generator.beta(1.0, 1.0), int(generator.integers(SIZE))
        return cutmix(images, share, row, int(generator.integers(SIZE)))

    chosen = recipe({"mixup": 0.4, "cutmix": 1.0})
    ((found, losses),) = run_distributed(by_engine, 1, chosen)
    expected, told = by_hand(chosen, either)
    assert losses == pytest.approx(told, rel=1e-5)
    assert furthest(found, expected) < 1e-5
    part = AugmentPart(mixup=0.4, cutmix=1.0)
    cuts = [draw(part, 0, step, 32, 32).box is not None for step in range(1000)]
    assert np.mean(cuts) == pytest.approx(0.5, abs=0.05)


def test_the_share_is_what_is_left_of_the_image() -> None:
    part, ones = AugmentPart(cutmix=1.0), torch.ones(2, 1, 32, 24)
    for step in range(50):
        mix = draw(part, 0, step, 32, 24)
        found = mixed(ones, torch.zeros_like(ones), mix)
        assert found.mean().item() == pytest.approx(mix.share, abs=1e-6)
        assert ones.all(), "the images were changed in place"
    found = shares({"cutmix": 1.0})
    assert 0 < found.min() < 0.2 < 0.9 < found.max() <= 1
