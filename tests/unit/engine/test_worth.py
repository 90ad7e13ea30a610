"""Compiling is chosen where it wins back its own seconds, by operations counted from the model's structure."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.engine.worth import compile_pays, flops_counter, flops_per_image, flops_per_text, peak_flops
from paceline.prepare.assemble import _compiles
from paceline.recipe import Recipe
from tests.parity.reference import tiny_model
from tests.parity.test_fully_connected import build_of
from tests.testing.tiny import tiny_resnet_config

H200, FLOPS = "NVIDIA H200", 75e9  # a review of 273 tokens through DistilBERT


def test_the_reckoning_is_told_and_longer_runs_pay() -> None:
    pays, reason = compile_pays(FLOPS, 105_000, H200, cached=False)
    assert pays is False, "27 s of steps do not win back 12 s"
    assert reason == "saves about 4 s of 27 s of steps, compiling takes about 12 s"
    assert compile_pays(FLOPS, 350_000, H200, cached=False)[0]
    assert not compile_pays(FLOPS, 3_500, H200, cached=False)[0]


def test_kept_kernels_pay_earlier_and_a_whole_model_later() -> None:
    pays, reason = compile_pays(FLOPS, 150_000, H200, cached=True)
    assert pays
    assert reason.endswith("compiling takes about 5 s from kept kernels")
    assert not compile_pays(FLOPS, 150_000, H200, cached=False)[0]
    assert not compile_pays(FLOPS, 350_000, H200, cached=False, whole_model=True)[0]


def test_a_slower_gpu_has_more_to_save() -> None:
    assert compile_pays(FLOPS, 150_000, "NVIDIA A100-SXM4-80GB", cached=False)[0]
    assert compile_pays(FLOPS, 150_000, "Tesla V100-SXM2-16GB", cached=False)[0], "no bf16: its fp16 rate counts"
    assert not compile_pays(FLOPS, 150_000, H200, cached=False)[0]


def test_an_unknown_gpu_counts_as_the_fastest_and_the_reason_says_so() -> None:
    pays, reason = compile_pays(FLOPS, 40_000, "Made-up 1000", cached=False)
    assert not pays
    assert "no rate is known of Made-up 1000: reckoned as fast as an NVIDIA H200" in reason
    assert compile_pays(FLOPS, 1_000_000, "Made-up 1000", cached=False)[0]


def test_a_cpu_is_never_compiled_for_unasked() -> None:
    pays, reason = compile_pays(FLOPS, 10**9, None, cached=True)
    assert not pays
    assert "CPU" in reason


def test_operations_of_a_text_are_those_that_torch_counts() -> None:
    model = tiny_model(dropout=0.0)
    model.set_attn_implementation("eager")  # whose products torch's counter sees
    blocks = model.distilbert.transformer
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        blocks(torch.randn(1, 24, 32))
    assert flops_per_text(list(blocks.layer), np.array([24])) == pytest.approx(3 * counter.get_total_flops())


def test_long_texts_weigh_by_the_square() -> None:
    blocks = list(tiny_model().distilbert.transformer.layer)
    even, uneven = flops_per_text(blocks, np.array([20, 20])), flops_per_text(blocks, np.array([10, 30]))
    assert uneven - even == pytest.approx(12 * 2 * 32 * 100)
    assert flops_per_text(blocks, np.array([], dtype=np.int64)) == 0


def test_operations_of_an_image_are_counted_without_touching_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 2))
    model.train()
    assert flops_per_image(model, (3, 8, 8)) == 3 * 2 * (4 * 3 * 9 * 64 + 4 * 64 * 2)
    assert model.training
    assert int(model[1].num_batches_tracked) == 0
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_resnet_of_transformers_is_counted_too() -> None:
    from transformers import AutoConfig, AutoModelForImageClassification

    settings = tiny_resnet_config()
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    assert flops_per_image(model, (3, 32, 32)) > 1e6


def test_the_work_of_given_samples_is_counted_by_their_lengths() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8, bias=False)

    blocks = [Block(), Block()]
    texts = Tokens(flat=np.zeros(12, np.uint16), offsets=np.array([0, 2, 6, 12]), pad_id=0)
    count = flops_counter(made(blocks), of(texts))
    # six a weight and token, twelve times the width a pair of tokens
    whole = 2 * (6 * 64 * (2 + 6) + 12 * 8 * (4 + 36))
    assert count(np.array([0, 2])) == whole
    blocks[0].requires_grad_(False)
    # forward alone
    assert flops_counter(made(blocks), of(texts))(np.array([0, 2])) == pytest.approx(whole / 2 + whole / 6)
    assert flops_counter(made([]), of(texts))(np.array([0])) is None


def test_the_work_of_images_is_counted_once() -> None:
    calls = []

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            calls.append(pixels.device.type)
            return self.layer(pixels.flatten(1))

    images = Images(np.zeros((5, 2, 2, 3), np.uint8))
    count = flops_counter(made([], Pixels()), of(images))
    assert (count(np.array([0, 1])), count(np.array([4]))) == (3 * 2 * 12 * 3 * 2, 3 * 2 * 12 * 3)
    assert calls == ["meta"]

    class Looks(Pixels):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.flatten(1)[:, :3] * pixels.sum().item()

    assert flops_counter(made([], Looks()), of(images))(np.array([0])) is None


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 989.5e12), ("fp16", 989.5e12), ("tf32", None)])
def test_peaks_are_those_of_the_number_format(precision: str, expected: float | None) -> None:
    assert peak_flops("NVIDIA H200", precision) == expected
    assert peak_flops(None, precision) is None


def made(blocks: list[nn.Module], model: nn.Module | None = None) -> Any:
    """As much of a build as is looked at."""
    return SimpleNamespace(blocks=blocks, model=model)


def of(inputs: Any) -> Any:
    return SimpleNamespace(inputs=inputs)


class Odd(nn.Module):
    """Cannot be copied, or says in its own way that it needs data."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 3)
        self.lock = None if copies else threading.Lock()

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type == "meta":
            raise ValueError("no such device")
        out: Tensor = self.layer(images)
        return out


@pytest.mark.parametrize("copies", [True, False], ids=["needs data", "cannot be copied"])
def test_a_model_whose_operations_cannot_be_counted_is_not_compiled_by_itself(copies: bool) -> None:
    build = build_of(Odd(copies=copies), 8)
    dataset = Dataset(
        inputs=Images(np.zeros((8, 8, 8, 1), np.uint8)),
        labels=np.zeros(8, np.int64),
        kind="classification",
        label_names=("a", "b"),
        splits={"train": np.arange(8)},
        origins=Origins(("made",), np.zeros(8, np.int32), np.arange(8)),
        fingerprint="made",
    )
    chosen = Recipe.parse({"model": {"source": "given"}, "data": {"source": "made.csv"}})
    # some device that is no CPU: nothing is asked of it
    compiled, decisions = _compiles(chosen, replace(build, device=torch.device("meta")), dataset)
    assert not compiled
    assert "cannot be counted" in decisions[0].reason
    assert flops_counter(build, dataset)(np.arange(8)) is None
