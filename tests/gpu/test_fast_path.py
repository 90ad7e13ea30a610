"""The path that is chosen by itself: packed, compiled, captured for every family, and equal to the plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.contract.records import RunRecord
from paceline.recipe import Recipe
from paceline.verbs.evaluate import evaluate
from paceline.verbs.train import resume, train

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 80,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128, "max_position_embeddings": 80},
    "bert": SIZES,
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "electra": {**SIZES, "embedding_size": 64},
    "modernbert": {**SIZES, "local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]},
}
PLAIN = {
    "packing": False,
    "early_pooling": False,
    "fused_qkv": False,
    "fusion": False,
    "embedding_gradient": False,
    "compile": False,
    "capture": False,
    "channels_last": False,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [2, 2],
    "layer_type": "basic",
}
WORDS = {"good": ["fine", "great", "lovely", "superb", "warm"], "bad": ["dull", "poor", "weak", "grey", "cold"]}


def rows(count: int = 320) -> list[dict[str, str]]:
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        label = ("good", "bad")[index % 2]
        words = generator.choice(WORDS[label] + ["the", "film", "was", "and"], generator.integers(3, 50))
        made.append({"text": " ".join(words), "label": label})
    return made


def run(out: Path, family: str, techniques: dict[str, Any], **settings: Any) -> RunRecord:
    drops = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0} if family == "distilbert" else {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
    config = {"model_type": family, **FAMILIES[family], **({} if family == "modernbert" else drops)}
    plain = {
        "model": {"config": config, "vocabulary_size": 200},
        "data": {"max_length": 64},
        "loop": {"epochs": 3, "batch_size": 16, "drop_last": True},
        "observe": {"console": "off"},
        "optimizer": {"lr": 1e-3},
        **settings,
        "techniques": {"compile": True, **techniques},
    }
    return train(Recipe.parse(plain), data=rows(), out=out)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_packed_compiled_and_captured(tmp_path: Path, family: str) -> None:
    fast = run(tmp_path / "fast", family, {})
    assert fast.execution["layout"].startswith("packed"), fast.execution
    assert fast.execution["compile"].startswith("each of 2 blocks"), fast.execution
    pooled = "off: the last block has no attention" if family == "modernbert" else "the last block"
    assert fast.execution["early_pooling"].startswith(pooled), fast.execution
    assert fast.execution["steps"].startswith("captured"), fast.execution
    run(tmp_path / "plain", family, PLAIN)
    quick, slow = losses(tmp_path / "fast"), losses(tmp_path / "plain")
    assert quick[:5] == pytest.approx(slow[:5], rel=0.02), "the first losses differ by more than bf16 rounding"
    assert np.mean(quick[-5:]) == pytest.approx(np.mean(slow[-5:]), abs=0.1)
    assert fast.final["test"]["accuracy"] > 0.9


def test_in_fp32_the_fast_path_follows_the_plain_one_closely(tmp_path: Path) -> None:
    for name, techniques in (("fast", {}), ("plain", PLAIN)):
        run(tmp_path / name, "bert", {**techniques, "precision": "fp32"})
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "bert", {}, loop={"epochs": 4, "batch_size": 16})
    run(tmp_path / "cut", "bert", {}, loop={"epochs": 4, "batch_size": 16, "max_steps": 20})
    before = losses(tmp_path / "cut")
    resume(tmp_path / "cut", ["loop.max_steps=null"], data=rows())
    after = losses(tmp_path / "cut")
    assert after[:20] == before
    assert len(after) == whole.steps
    # the learning rate of the first 20 steps was that of a shorter run; it is the end that must be alike
    assert np.mean(after[-5:]) == pytest.approx(np.mean(losses(tmp_path / "whole")[-5:]), abs=0.1)


def test_accumulation_takes_the_same_path(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "bert", {"precision": "fp32"}, loop={"epochs": 2, "batch_size": 16})
    cut = run(
        tmp_path / "cut", "bert", {"precision": "fp32"}, loop={"epochs": 2, "batch_size": 16, "micro_batch_size": 6}
    )
    assert cut.execution["steps"].startswith("captured")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=2e-3), whole.execution


def test_the_saved_model_measures_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    record = run(tmp_path / "run", "roberta", {})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    found = evaluate(tmp_path / "run", data=str(tmp_path / "rows.jsonl"))
    assert found.metrics["accuracy"] > 0.9
    assert not any("_orig_mod" in name for name in _names(tmp_path / "run")), record.execution


def test_padded_batches_are_captured_and_follow_eager_ones(tmp_path: Path) -> None:
    alike = {"packing": False, "compile": False}
    for name, captures in (("captured", "auto"), ("eager", False)):
        found = run(tmp_path / name, "bert", {**alike, "capture": captures})
        assert found.execution["steps"].startswith("captured" if captures else "eager"), found.execution
    assert losses(tmp_path / "captured")[:5] == pytest.approx(losses(tmp_path / "eager")[:5], rel=0.02)


def test_pure_bf16_is_captured_and_learns(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "bert", {"precision": "pure_bf16", "compile": False})
    assert found.execution["steps"].startswith("captured"), found.execution
    assert np.mean(losses(tmp_path / "run")[-5:]) < 0.6 * losses(tmp_path / "run")[0]


# torch's tracer warns of what it does itself where it traces a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_our_gradients_of_embeddings_are_captured_and_follow_torchs(tmp_path: Path) -> None:
    for name, ours in (("ours", True), ("torchs", False)):
        found = run(tmp_path / name, "bert", {"precision": "fp32", "embedding_gradient": ours})
        assert found.execution["steps"].startswith("captured"), found.execution
        assert ("embedding_gradient" in found.execution) == ours, found.execution
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "torchs"), rel=2e-3)


def test_a_frozen_backbone_is_captured(tmp_path: Path) -> None:
    plain = run(tmp_path / "run", "bert", {"compile": "auto"}, model={
        "config": {"model_type": "bert", **SIZES}, "vocabulary_size": 200, "train": "head"})  # fmt: skip
    assert plain.execution["steps"].startswith("captured"), plain.execution


def test_images_are_captured_with_channels_last_and_augmented(tmp_path: Path) -> None:
    recipe = Recipe.parse(
        {
            "model": {"config": RESNET},
            "data": {"source": "builtin:digits", "augment": {"crop": 1}},
            "loop": {"epochs": 4, "batch_size": 32},
            "optimizer": {"lr": 5e-3},
            "techniques": {"compile": True},
            "observe": {"console": "off"},
        }
    )  # fmt: skip
    record = train(recipe, out=tmp_path / "run")
    assert record.execution["steps"].startswith("captured"), record.execution
    assert record.execution["fully_connected"] == "5 convolutions", record.execution
    assert record.execution["channels_last"] == "on", record.execution
    assert record.final["test"]["accuracy"] > 0.8


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model" / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_cuda_is_what_ran() -> None:
    assert torch.cuda.is_available()
