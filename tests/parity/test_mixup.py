"""mixup is the paper's formula over the global batch, whoever computes which part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline
from paceline.contract.errors import RecipeError
from paceline.data.mixing import draw, partners
from paceline.recipe import Recipe
from paceline.recipe.parts import AugmentPart
from paceline.seams import Alone
from tests.distributed.splitting import furthest
from tests.parity.mixing import by_engine, by_hand, mixup, recipe, shares
from tests.testing.distributed import run_distributed
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config

AUGMENT = {"mixup": 0.4}


def drawn(images: Tensor, step: int) -> tuple[Tensor, float]:
    share = np.random.default_rng((0, step, 0, 0, 3)).beta(0.4, 0.4)
    return mixup(images, share)


@pytest.mark.parametrize("micro", [None, 3], ids=["one", "several"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_epochs_are_those_of_a_plain_loop(ranks: int, micro: int | None) -> None:
    chosen = recipe(AUGMENT, micro)
    expected, told = by_hand(chosen, drawn)
    for found, losses in run_distributed(by_engine, ranks, chosen):
        assert furthest(found, expected) < 1e-5
        assert losses == pytest.approx(told, rel=1e-5)


def test_without_it_the_weights_are_others() -> None:
    """The comparison can fail."""
    assert furthest(by_engine(Alone(), recipe({}))[0], by_hand(recipe(AUGMENT), drawn)[0]) > 1e-2


def test_shares_are_of_the_beta_distribution_and_follow_from_seed_and_step() -> None:
    found = shares({"mixup": 0.2})
    assert found.mean() == pytest.approx(0.5, abs=0.03)
    # variance of Beta(a, a): 1 / (4 (2 a + 1))
    assert found.var() == pytest.approx(1 / (4 * 1.4), rel=0.05)
    part = AugmentPart(mixup=0.2)
    assert draw(part, 0, 7, 32, 32) == draw(part, 0, 7, 32, 32)
    assert draw(part, 1, 7, 32, 32) != draw(part, 0, 7, 32, 32) != draw(part, 0, 8, 32, 32)


def test_partners_are_those_before_in_the_global_batch() -> None:
    samples = np.array([7, 3, 9, 5])
    one, other, none = partners(samples, [np.array([3, 5]), np.array([7, 9]), np.empty(0, np.int64)])
    assert one.tolist() == [7, 9]
    assert other.tolist() == [5, 3]
    assert len(none) == 0


def whole(**data: object) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config()},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 24, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
                "augment": {"mixup": 0.2, "cutmix": 1.0, "flip": True, "crop": 1},
                **data,
            },
            "schedule": {"type": "constant", "warmup": 0},
            "loop": {"epochs": 2, "batch_size": 6, "micro_batch_size": 4, "checkpoint_every": 2, "save_best": False},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def test_a_run_that_goes_on_mixes_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    straight = paceline.train(whole(), out=tmp_path / "straight")
    paceline.train(whole().with_settings(["loop.max_steps=4"]), out=tmp_path / "parts")
    again = paceline.resume(tmp_path / "parts", ["loop.max_steps=null"])
    assert again.final == straight.final
    one, two = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "parts"))
    assert one.read_bytes() == two.read_bytes()


def test_texts_cannot_be_mixed(tmp_path: Path) -> None:
    plain = whole().plain()
    plain["model"]["config"] = tiny_bert_config()
    plain["data"] = {"source": "builtin:random", "random": {"samples": 24, "length": 8, "vocabulary": 200}}
    plain["data"]["augment"] = AUGMENT
    with pytest.raises(RecipeError, match=r"data\.augment: has no effect"):
        paceline.train(Recipe.parse(plain), out=tmp_path / "run")


def test_an_alpha_below_zero_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.augment\.mixup"):
        recipe({"mixup": -0.1})


def test_the_example_of_the_page_is_the_loss_of_soft_labels() -> None:
    from paceline.data.mixing import mixed

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    mix = draw(AugmentPart(mixup=0.2), 0, 3, height=8, width=8)
    expected, share = mixup(images, mix.share)
    assert torch.equal(mixed(images, images.roll(1, 0), mix), expected)
    assert share == mix.share
