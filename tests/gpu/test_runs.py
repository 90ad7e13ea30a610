"""Whole runs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.recipe import Recipe
from paceline.verbs.train import train
from tests.testing.tiny import tiny_bert_config

WORDS = {"good": ["fine", "great", "lovely", "superb", "warm"], "bad": ["dull", "poor", "weak", "grey", "cold"]}


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [
        {"text": " ".join(WORDS[label][(i * k) % 5] for k in range(1, 4 + i % 9)) + f" number {i}", "label": label}
        for i in range(120)
        for label in WORDS
    ]


def run(rows: list[dict[str, str]], out: Path, **settings: object) -> dict[str, torch.Tensor]:
    plain = {
        "model": {"config": tiny_bert_config(), "vocabulary_size": 200},
        "data": {"max_length": 16},
        "loop": {"epochs": 4, "batch_size": 8},
        "observe": {"console": "off"},
        "optimizer": {"lr": 5e-3},
        **settings,
    }
    record = train(Recipe.parse(plain), data=rows, out=out)
    assert record.status == "finished"
    assert record.memory
    assert record.memory.total >= record.memory.reserved >= record.memory.allocated == record.peak_bytes > 0
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize("precision", ["auto", "fp32", "tf32", "bf16", "fp16"])
def test_a_run_on_the_gpu_learns(rows: list[dict[str, str]], tmp_path: Path, precision: str) -> None:
    run(rows, tmp_path / "run", techniques={"precision": precision})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final"]["test"]["accuracy"] > 0.9
    scaling = summary["loss_scaling"]
    assert (scaling is not None) is (precision == "fp16")
    if scaling:
        assert scaling["lowest"] <= scaling["last"] <= scaling["highest"]
        assert scaling["skipped"] == summary["steps"] - summary["applied_steps"]
        assert 0 <= scaling["zero_share"] < 1
    recipe = Recipe.load(tmp_path / "run" / "recipe.yaml")
    assert recipe.device == "cuda"
    assert recipe.techniques.precision == ("bf16" if precision == "auto" else precision)


def test_the_peak_may_come_before_the_first_step(rows: list[dict[str, str]], tmp_path: Path) -> None:
    """Where the head alone is trained, nothing takes as much as the copy that packed and padded are compared on."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    model = {"config": {**tiny_bert_config(), **sizes}, "vocabulary_size": 200, "train": "head"}
    weights = run(rows, tmp_path / "run", model=model, techniques={"packing": True})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["memory"]["allocated"] > 2 * sum(weight.nbytes for weight in weights.values())


def test_deterministic_runs_have_equal_bits(rows: list[dict[str, str]], tmp_path: Path) -> None:
    one, other = (run(rows, tmp_path / name, deterministic=True) for name in "ab")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert not torch.are_deterministic_algorithms_enabled()
