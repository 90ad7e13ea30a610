"""Whole runs over techniques that are chosen by themselves: on this machine, on another, and where they go wrong."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from tests.testing.tiny import tiny_resnet_config, write_tiny_model

MIXING = {
    "model_type": "mobilebert",
    **dict.fromkeys(("hidden_size", "embedding_size", "intra_bottleneck_size", "true_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
"""Its embedding of a token looks at the tokens beside it, also across the border of two texts."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path, draw = tmp_path / "films.csv", random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(40):
            words = draw.choices(["plot", "thin", "fine", "dull", "music", "light"], k=draw.randint(1, 30))
            writer.writerow([" ".join(words), "good" if "fine" in words else "bad"])
    return path


def recipe(model: Path, source: Path, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"source": str(model)},
        "data": {"source": str(source), "splits": {"validation": 0.2, "test": 0.2}},
        "loop": {"epochs": 1, "batch_size": 8, "max_steps": 3},
        "observe": {"console": "off", "report": False},
        "device": "cpu",
    }
    return Recipe.parse({**base, **{key: {**base.get(key, {}), **value} for key, value in changes.items()}})


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_model_that_looks_across_texts_is_found_out_at_any_batch_size(
    batch_size: int, source: Path, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "mobile", MIXING)
    record = paceline.train(recipe(model, source, loop={"batch_size": batch_size}), out=tmp_path / "run")
    assert record.execution["layout"] == "padded"
    assert "MobileBert" in next(d.reason for d in record.decisions if d.setting == "techniques.packing")


def test_a_run_that_was_not_to_be_packed_is_measured_unpacked(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paceline.train(
        recipe(write_tiny_model(tmp_path / "model"), source, techniques={"packing": False}), out=tmp_path / "run"
    )
    monkeypatch.setattr("paceline.techniques.packing.apply", lambda *_, **__: pytest.fail("it was packed"))
    assert paceline.evaluate(tmp_path / "run").samples == 8
    assert paceline.predict(tmp_path / "run", str(source), tmp_path / "out.csv") == 40


def test_a_run_of_another_machine_goes_on_here(source: Path, tmp_path: Path) -> None:
    """Its recipe says what was switched on there, as if it had been asked for."""
    model = write_tiny_model(tmp_path / "model")
    paceline.train(recipe(model, source), out=tmp_path / "run")
    file = tmp_path / "run" / "recipe.yaml"
    there = yaml.safe_load(file.read_text())
    there["device"], there["data"]["resident"] = "cuda", True
    names = ("packing", "early_pooling", "compile", "capture", "fused_qkv", "fusion", "embedding_gradient")
    there["techniques"] |= dict.fromkeys(names, True)
    file.write_text(yaml.safe_dump(there))
    record = paceline.resume(tmp_path / "run", ["device=cpu", "loop.max_steps=null", "loop.epochs=2"])
    assert record.steps == 6
    assert record.execution["steps"].startswith("eager")


def test_packing_images_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    plain = {
        "model": {"config": tiny_resnet_config()},
        "data": {"source": "builtin:digits"},
        "techniques": {"packing": True},
        "device": "cpu",
    }
    with pytest.raises(RecipeError, match="it packs texts, and the data are images"):
        paceline.train(Recipe.parse(plain), out=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_path_is_in_the_summary(source: Path, tmp_path: Path) -> None:
    paceline.train(recipe(write_tiny_model(tmp_path / "model"), source), out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["execution"]["layout"] == "packed"
    assert summary["execution"]["steps"] == "eager: there are no CUDA graphs on a CPU"
    assert summary["first_update_seconds"] > 0
