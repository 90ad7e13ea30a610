"""A whitening first convolution has the filters that somebody would work out by hand, and keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.contract.errors import ModelError, RecipeError
from paceline.models.whitening import apply_whitening
from paceline.recipe import Recipe
from paceline.testing.tiny import tiny_resnet_config


def images(count: int = 40, channels: int = 3) -> Tensor:
    """Smooth ones: neighbours are alike, as in photographs."""
    noise = torch.randn(count, channels, 9, 9, generator=torch.Generator().manual_seed(0))
    return nn.functional.avg_pool2d(noise, 3, 1) * 3


def by_hand(given: Tensor, size: int) -> np.ndarray:
    """[D, D]: a whitening direction a row, by singular values of the patches themselves."""
    pixels = given.double().numpy()
    patches = np.array(
        [
            image[:, row : row + size, column : column + size].ravel()
            for image in pixels
            for row in range(pixels.shape[2] - size + 1)
            for column in range(pixels.shape[3] - size + 1)
        ]
    )
    _, singular, directions = np.linalg.svd(patches - patches.mean(0), full_matrices=False)
    return directions / np.sqrt(singular**2 / len(patches) + 5e-4)[:, None]


def test_filters_are_the_main_directions_of_patches_with_both_signs() -> None:
    layer = nn.Conv2d(3, 10, 2)
    assert apply_whitening(nn.Sequential(nn.ReLU(), layer), images(), 3) == "1"
    found, expected = layer.weight.detach().flatten(1).numpy(), by_hand(images(), 2)
    assert np.allclose(found[::2], -found[1::2])
    for ours, theirs in zip(found[::2], expected, strict=False):
        assert np.allclose(ours, theirs * np.sign(theirs @ ours), atol=1e-3)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert not layer.bias.any()


def test_what_it_puts_out_is_white() -> None:
    layer = nn.Conv2d(3, 24, 2, bias=False)
    apply_whitening(layer, images(), 3)
    out = layer(images())[:, ::2].movedim(1, -1).flatten(0, 2).detach()
    assert torch.allclose(out.T.cov(), torch.eye(12), atol=0.05)
    plain = nn.Conv2d(3, 24, 2, bias=False)(images())[:, ::2].movedim(1, -1).flatten(0, 2).detach()
    assert not torch.allclose(plain.T.cov(), torch.eye(12), atol=0.5), "the comparison can fail"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no convolution over images of 3 channels"):
        apply_whitening(nn.Linear(2, 2), None, 3)
    with pytest.raises(ModelError, match="0 has 26 filters, and its patches 12 directions"):
        apply_whitening(nn.Sequential(nn.Conv2d(3, 26, 2)), None, 3)
    with pytest.raises(ModelError, match="each group of channels by itself"):
        apply_whitening(nn.Sequential(nn.Conv2d(3, 6, 2, groups=3)), None, 3)


def whole(**more: object) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(), "whitening": True},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 24, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
            },
            "loop": {"epochs": 2, "batch_size": 4, "checkpoint_every": 2, "save_best": False},
            "schedule": {"type": "constant", "warmup": 0},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
            **more,
        }
    )


def stem(folder: Path) -> Tensor:
    found = load_file(folder / "model" / "model.safetensors")
    return next(tensor for name, tensor in found.items() if tensor.ndim == 4 and "embedder" in name)


def test_a_run_keeps_its_filters_and_is_evaluated_and_resumed_with_them(tmp_path: Path) -> None:
    record = paceline.train(whole(), out=tmp_path / "straight")
    filters = stem(tmp_path / "straight")
    assert torch.equal(filters[::2], -filters[1::2])
    paceline.train(whole().with_settings(["loop.max_steps=4"]), out=tmp_path / "parts")
    assert torch.equal(stem(tmp_path / "parts"), filters), "training has moved them"
    paceline.resume(tmp_path / "parts", ["loop.max_steps=null"])
    one, two = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "parts"))
    assert one.read_bytes() == two.read_bytes()
    again = paceline.evaluate(tmp_path / "straight", split="validation")
    assert again.loss == pytest.approx(record.final["validation"]["loss"], rel=1e-6)


def test_a_pretrained_first_layer_is_not_thrown_away(tmp_path: Path) -> None:
    paceline.train(whole(), out=tmp_path / "run")
    recipe = whole(model={"source": str(tmp_path / "run" / "model"), "whitening": True})
    recipe = recipe.with_settings(["data.image_size=8"])
    with pytest.raises(RecipeError, match="first layer is pretrained"):
        paceline.train(recipe, out=tmp_path / "other")
