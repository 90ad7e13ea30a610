"""``data.normalise``: in training, in evaluations, in predictions and in the saved model alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

import paceline
from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.models.images import NORMALISATIONS, ImageSettings, normalised_by
from paceline.models.processor import open_processor
from paceline.recipe import Recipe
from paceline.recipe.parts import AugmentPart, NormalisePart
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config

RGB = ImageSettings(height=8, width=8, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
CIFAR10 = NORMALISATIONS["cifar10"]


def recipe(channels: int = 3, **data: Any) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(num_channels=channels)},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 24, "image": (8, 8, channels)},
                "splits": {"validation": 8, "test": 0},
                **data,
            },
            "loop": {"epochs": 1, "batch_size": 8},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def test_names_and_numbers_take_the_place_of_the_models_own() -> None:
    assert normalised_by(RGB, "own") is RGB
    assert normalised_by(RGB, "imagenet").mean == (0.485, 0.456, 0.406)
    assert normalised_by(RGB, NormalisePart(mean=(0.1, 0.2, 0.3), std=(1.0, 0.5, 0.2))).std == (1.0, 0.5, 0.2)


def test_it_comes_after_the_augmentation() -> None:
    """What a crop uncovers is black, and black is -mean / std."""
    white = Images(np.full((1, 8, 8, 3), 255, np.uint8))
    augment = AugmentPart(crop=3)
    layout = ImageLayout(
        white, np.zeros(1, np.int64), torch.device("cpu"), mean=CIFAR10.mean, deviation=CIFAR10.std, augment=augment
    )
    seen = torch.cat([layout.collate(np.zeros(1, np.int64), draw).inputs["pixel_values"] for draw in range(8)])
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (CIFAR10.mean, CIFAR10.std))
    for level in (0, 1):
        assert (seen - (level - mean) / std).abs().amin((0, 2, 3)).max() < 1e-6


def test_a_run_is_saved_and_evaluated_with_it(tmp_path: Path) -> None:
    record = paceline.train(recipe(normalise="cifar10"), out=tmp_path / "run")
    saved = tmp_path / "run" / "model"
    assert json.loads((saved / "paceline.json").read_text())["image"]["mean"] == list(CIFAR10.mean)
    processor = open_processor(saved, "saved")
    assert processor is not None
    assert processor.mean == pytest.approx(CIFAR10.mean, abs=1e-6)
    assert processor.std == pytest.approx(CIFAR10.std, rel=1e-5)
    loss = record.final["validation"]["loss"]
    assert paceline.evaluate(tmp_path / "run", split="validation").loss == pytest.approx(loss, rel=1e-6)
    plain = paceline.train(recipe(), out=tmp_path / "plain")
    assert plain.final["validation"]["loss"] != pytest.approx(loss, rel=1e-6), "it had no effect"


def test_a_processor_of_the_models_own_is_saved_with_it(tmp_path: Path) -> None:
    own = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 8, "width": 8},
        "do_normalize": False,
    }
    found = normalised_by(replace(RGB, processor=own), "imagenet")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found.written()))
    processor = open_processor(tmp_path, "saved")
    assert processor is not None
    assert processor.mean == pytest.approx((0.485, 0.456, 0.406), abs=1e-6)


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("imagenet", "it is of 3 channels, and the images have 1"),
        ({"mean": [0.5, 0.5], "std": [0.5, 0.5]}, r"mean = \[0.5, 0.5\]"),
    ],
)
def test_another_number_of_channels_is_refused(wish: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=why):
        paceline.train(recipe(1, normalise=wish), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"mean": [123.7, 116.3, 103.5], "std": [58.4, 57.1, 57.4]}, "divided by 255"),
        ({"mean": [0.5], "std": [0.0]}, "a deviation is above 0"),
        ({"mean": [0.5], "std": [0.5, 0.5]}, "1 means and 2 deviations"),
        ("cifar", "imagenet"),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(wish: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe(normalise=wish)


def test_texts_have_no_use_for_it(tmp_path: Path) -> None:
    plain = recipe(normalise="imagenet").plain()
    plain["model"]["config"] = tiny_bert_config()
    plain["data"]["random"] = {"samples": 24, "length": 8, "vocabulary": 200}
    with pytest.raises(RecipeError, match=r"data\.normalise: has no effect"):
        paceline.train(Recipe.parse(plain), out=tmp_path / "run")


def test_the_key_of_a_processor_is_of_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced before transformers reads it: the pixels are those of the new one, and so is the key."""
    path = tmp_path / "preprocessor_config.json"

    def write(side: int) -> None:
        path.write_text(json.dumps(replace(RGB, height=side, width=side).written()))

    def key() -> str:
        processor = open_processor(tmp_path, "m")
        assert processor is not None
        return processor.key

    load = AutoImageProcessor.from_pretrained

    def replace_and_load(*arguments: object, **options: object) -> object:
        write(16)
        return load(*arguments, **options)

    write(16)
    expected = key()
    write(8)
    assert key() != expected
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", replace_and_load)
    assert key() == expected
