"""DeepSpeed on real GPUs: every stage and offload trains as it does without, alone and on two.

``python -m tests.gpu.test_deepspeed`` prints losses, speed and peak memory of all of them, a fresh process each.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.recipe import Recipe
from tests.gpu.test_fast_path import losses, rows
from tests.parity.test_deepspeed import why_no_disk

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(300),
]

DISK = f"parallel.offload_folder={tempfile.gettempdir()}"
WAYS: dict[str, tuple[str, ...]] = {
    "stage 1": ("parallel.stage=1",),
    "stage 2": ("parallel.stage=2",),
    "stage 3": ("parallel.stage=3",),
    "stage 2, optimizer offloaded": ("parallel.stage=2", "parallel.offload=optimizer"),
    "stage 3, optimizer offloaded": ("parallel.stage=3", "parallel.offload=optimizer"),
    "stage 3, parameters offloaded": ("parallel.stage=3", "parallel.offload=parameters"),
    "stage 3, optimizer on a disk": ("parallel.stage=3", "parallel.offload=optimizer", DISK),
    "stage 3, parameters offloaded, the rest on a disk": ("parallel.stage=3", "parallel.offload=parameters", DISK),
}
SMALL: dict[str, Any] = {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024, "max_position_embeddings": 80}
LARGE: dict[str, Any] = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "max_position_embeddings": 512}
STEPS, SECONDS = 12, 240


def trained(
    folder: Path, settings: Sequence[str], gpus: int, sizes: dict[str, Any] = SMALL, vocabulary: int = 200
) -> Path:
    """The folder of a run of its own process, without dropout."""
    folder.mkdir(parents=True, exist_ok=True)
    drops = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows(640))))
    plain = {
        "model": {"config": {"model_type": "distilbert", **sizes, **drops}, "vocabulary_size": vocabulary},
        "data": {"source": str(folder / "rows.jsonl"), "max_length": 64},
        "loop": {"max_steps": STEPS, "batch_size": 32, "drop_last": True},
        "observe": {"console": "off", "report": False},
        # with the usual epsilon AdamW turns the rounding of tiny gradients into steps of the learning rate's size
        "optimizer": {"lr": 2e-4, "eps": 1e-4},
        "techniques": {"compile": False, "fusion": False, "capture": False, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(Recipe.parse(plain).with_settings(settings).to_yaml())
    command = [sys.executable, "-m", "paceline", "train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]
    done = subprocess.run([*command, "--gpus", str(gpus)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module", params=[1, 2])
def without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[float]]:
    gpus: int = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two CUDA GPUs")
    return gpus, losses(trained(tmp_path_factory.mktemp("without"), [], gpus))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_trains_as_without_it(way: str, without: tuple[int, list[float]], tmp_path: Path) -> None:
    gpus, expected = without
    if DISK in WAYS[way] and (why := why_no_disk(on_gpu=True)):
        pytest.skip(why)
    run = trained(tmp_path, ["parallel.strategy=deepspeed", *WAYS[way]], gpus)
    assert "deepspeed: ZeRO stage" in json.loads((run / "summary.json").read_text())["execution"]["parallel"]
    found = losses(run)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)


def show(folder: Path, gpus: int) -> None:
    """Print a line for each way: how far the losses are from those without it, speed and peak memory."""
    expected: list[float] = []
    for name, settings in {"without": (), **WAYS}.items():
        strategy = ("parallel.strategy=deepspeed",) if settings else ()
        said: dict[str, Any] = {"gpus": gpus, "way": name}
        try:
            run = trained(folder / f"{gpus} {name}", [*strategy, *settings], gpus, LARGE, 30522)
        except AssertionError as error:
            print(json.dumps({**said, "failed": str(error)[-1500:]}), flush=True)
            continue
        found, summary = losses(run), json.loads((run / "summary.json").read_text())
        expected = expected or found
        said["losses_apart"] = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        said |= {key: summary[key] for key in ("samples_per_second", "peak_bytes", "memory")}
        print(json.dumps({**said, "losses": [round(loss, 5) for loss in found]}), flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as scratch:
        for count in range(1, min(torch.cuda.device_count(), 2) + 1):
            show(Path(scratch), count)
