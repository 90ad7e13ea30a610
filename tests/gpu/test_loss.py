"""Losses of rare labels in captured steps: those of eager ones, and nothing that waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.prepare.assemble import Assembled, assemble
from paceline.seams import Build
from paceline.tasks import task_for
from paceline.techniques import precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.driving import recipe

CUDA = torch.device("cuda")
NAMES, WEIGHTS = ("a", "b", "c"), (0.5, 1.0, 4.0)

TASKS: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing": 0.1},
    "focal": {"loss": "focal", "focal_gamma": 0.5},
}


def made(capture: bool, kind: str, task: dict[str, Any]) -> tuple[Assembled, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 64) if kind == "classification" else random.integers(0, 2, (64, 3), dtype=np.int64)
    labels = labels if kind == "classification" else labels.astype(np.float32)
    images = Images(random.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)).to(CUDA)
    chosen = recipe(techniques={"precision": "bf16", "capture": capture}, task=task)
    build = Build(
        model=model,
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=ImageLayout(images, labels, CUDA, mean=(0.5,), deviation=(0.5,)),
        task=task_for(kind, NAMES, chosen.task, class_weights=WEIGHTS, device=CUDA),
        device=CUDA,
    )
    return assemble(chosen, precision.apply(build, "bf16"), 50), labels


def step(run: Assembled, labels: np.ndarray, index: int) -> tuple[torch.Tensor, ...]:
    """One step of 8 samples in two micro-batches; its denominator is another each time."""
    ids = np.random.default_rng(index).integers(0, 64, 8)
    batches = [run.build.layout.collate(part) for part in np.split(ids, [5])]
    done = run.engine.accumulate_batches(batches, run.build.task.denominator(labels[ids]), step=index)
    update = run.engine.update()
    return done.loss, update.norm, update.finite


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_captured_steps_are_those_of_eager_ones(kind: str, task: dict[str, Any]) -> None:
    (eager, labels), (captured, _) = made(False, kind, task), made(True, kind, task)
    for index in range(16):
        for one, other in zip(step(eager, labels, index), step(captured, labels, index), strict=True):
            # a captured batch is filled up to the size of its graph, so that sums may be taken in another order
            told = f"step {index}: {one} eager, {other} captured"
            torch.testing.assert_close(other, one, rtol=1e-5, atol=0, msg=told)
    assert captured.engine.execution["steps"].startswith("captured"), captured.engine.execution
    assert eager.engine.execution["steps"].startswith("eager")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_no_captured_step_waits(kind: str, task: dict[str, Any]) -> None:
    run, labels = made(True, kind, task)
    for index in range(12):
        step(run, labels, index)
    with waits_are_errors():
        for index in range(12, 20):
            step(run, labels, index)
