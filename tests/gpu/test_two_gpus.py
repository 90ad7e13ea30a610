"""Whole runs on two GPUs: gradients that are summed otherwise, or kept in less, train as they do by default."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.recipe import Recipe
from tests.gpu.test_fast_path import SIZES, losses, rows

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.timeout(300),
]

SUMMED = {
    "one piece": ["parallel.bucket_mib=192"],
    "many pieces": ["parallel.bucket_mib=1"],
}
KEPT_IN_LESS = {"whole": ["parallel.strategy=ddp"], "shards": ["parallel.strategy=fsdp"]}


def trained(folder: Path, settings: Sequence[str], where: Sequence[str] = ("--gpus", "2")) -> list[float]:
    """Losses of a run on all ranks, without dropout."""
    config = {"model_type": "bert", **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    plain = {
        "model": {"config": config, "vocabulary_size": 200},
        "data": {"source": str(folder / "rows.jsonl"), "max_length": 64},
        "loop": {"epochs": 3, "batch_size": 16, "drop_last": True},
        "observe": {"console": "off", "report": False},
        "optimizer": {"lr": 1e-3},
        "techniques": {"compile": False, "precision": "fp32"},
    }
    recipe = Recipe.parse(plain).with_settings(settings)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "paceline", "train", str(folder / "recipe.yaml")]
    done = subprocess.run([*command, *where, "--out", str(folder / "run")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder / "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(tmp_path_factory.mktemp("whole"), [])


@pytest.mark.parametrize("settings", SUMMED.values(), ids=SUMMED)
def test_what_is_summed_otherwise_trains_alike(settings: list[str], expected: list[float], tmp_path: Path) -> None:
    found = trained(tmp_path, settings)
    assert found[-1] < 0.5 * found[0], "it has learnt nothing"
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("settings", KEPT_IN_LESS.values(), ids=KEPT_IN_LESS)
def test_weights_in_bf16_learn(settings: list[str], tmp_path: Path) -> None:
    found = trained(tmp_path, [*settings, "techniques.precision=pure_bf16"])
    assert np.mean(found[-5:]) < 0.6 * found[0]
