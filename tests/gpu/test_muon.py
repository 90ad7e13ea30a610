"""Muon, whitening and alternating flip on a GPU, where steps are captured and the update is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import paceline
from paceline.recipe import Recipe
from paceline.testing.tiny import tiny_resnet_config

pytestmark = pytest.mark.gpu


def whole(device: str) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(), "whitening": True},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 32, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
                "augment": {"alternating_flip": True},
            },
            "optimizer": {"type": "muon", "momentum": 0.95, "lr": 1e-3, "clip_norm": None},
            "techniques": {"precision": "fp32"},
            "schedule": {"type": "constant", "warmup": 0},
            "loop": {"epochs": 2, "batch_size": 8, "save_best": False},
            "device": device,
            "observe": {"console": "off", "report": False},
        }
    )


def test_a_speedrun_learns_what_it_learns_on_a_cpu(tmp_path: Path) -> None:
    records = {device: paceline.train(whole(device), out=tmp_path / device) for device in ("cpu", "cuda")}
    ours, theirs = (load_file(tmp_path / device / "model" / "model.safetensors") for device in ("cuda", "cpu"))
    for name, tensor in ours.items():
        if tensor.is_floating_point():
            # Muon multiplies in bf16, whose sums are rounded otherwise on another device
            assert (tensor - theirs[name]).abs().max() < 2e-2, name
    cpu, cuda = (records[device].final["validation"]["loss"] for device in ("cpu", "cuda"))
    assert cuda == pytest.approx(cpu, rel=2e-2)
