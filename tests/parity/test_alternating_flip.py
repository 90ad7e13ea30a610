"""Alternating flip: each image is mirrored every second epoch, whoever computes which part of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline
from paceline.contract.errors import RecipeError
from paceline.data.alternating_flip import first_mirrored, mirrored
from paceline.machine.facts import this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.testing.distributed import run_distributed
from paceline.testing.tiny import tiny_resnet_config
from tests.distributed.splitting import furthest
from tests.parity.mixing import BATCH, SAMPLES, by_engine, by_hand, recipe

AUGMENT = {"alternating_flip": True}


def flipped(images: Tensor, step: int) -> tuple[Tensor, float]:
    epoch, place = divmod(step, -(-SAMPLES // BATCH))
    order = np.random.default_rng((0, epoch)).permutation(np.arange(SAMPLES))
    first = np.random.default_rng((0, 0, 0, 0, 4)).random(SAMPLES) < 0.5
    chosen = first[order[place * BATCH : (place + 1) * BATCH]]
    if epoch % 2:
        chosen = ~chosen
    return torch.where(torch.from_numpy(chosen)[:, None, None, None], images.flip(-1), images), 1.0


@pytest.mark.parametrize("micro", [None, 3], ids=["one", "several"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_epochs_are_those_of_a_plain_loop(ranks: int, micro: int | None) -> None:
    chosen = recipe(AUGMENT, micro)
    expected, told = by_hand(chosen, flipped)
    for found, losses in run_distributed(by_engine, ranks, chosen):
        assert furthest(found, expected) < 1e-5
        assert losses == pytest.approx(told, rel=1e-5)


def test_without_it_the_weights_are_others() -> None:
    """The comparison can fail."""
    expected, _ = by_hand(recipe({}), lambda images, step: (images, 1.0))
    assert furthest(by_hand(recipe(AUGMENT), flipped)[0], expected) > 1e-3


def test_every_image_is_mirrored_in_one_of_two_epochs() -> None:
    first, ids = first_mirrored(1000, seed=3), np.arange(1000)
    assert 400 < first.sum() < 600
    for epoch in range(4):
        now, then = mirrored(first, ids, epoch), mirrored(first, ids, epoch + 1)
        assert (now ^ then).all()
    assert (first != first_mirrored(1000, seed=4)).any()


def whole(**augment: object) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config()},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 24, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
                "augment": {**AUGMENT, **augment},
            },
            "loop": {"epochs": 2, "batch_size": 6, "checkpoint_every": 2, "save_best": False},
            "schedule": {"type": "constant", "warmup": 0},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def test_a_run_that_goes_on_mirrors_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    paceline.train(whole(crop=1), out=tmp_path / "straight")
    paceline.train(whole(crop=1).with_settings(["loop.max_steps=4"]), out=tmp_path / "parts")
    paceline.resume(tmp_path / "parts", ["loop.max_steps=null"])
    one, two = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "parts"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("setting", ["data.augment.flip=true", "loop.sampler=balanced"])
def test_what_has_no_sense_beside_it_is_refused_before_anything_loads(setting: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.augment\.alternating_flip"):
        choose(whole().with_settings([setting]), this_machine())
