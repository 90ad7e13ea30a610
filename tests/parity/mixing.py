"""Images that are mixed in pairs: paceline's engine and course beside a plain loop with the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.dataset import Dataset, Images, Origins
from paceline.data.mixing import draw
from paceline.prepare.assemble import assemble, assemble_build
from paceline.prepare.course import Course
from paceline.recipe import Recipe
from paceline.recipe.parts import AugmentPart
from paceline.seams import Mesh, World
from paceline.tasks import task_for
from tests.parity import driving

SAMPLES, BATCH, STEPS, SIZE, CLASSES = 22, 8, 6, 6, 3
"""The third step of an epoch has six samples."""


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, CLASSES))


def data() -> Dataset:
    generator = np.random.default_rng(0)
    return Dataset(
        inputs=Images(generator.integers(0, 256, (SAMPLES, SIZE, SIZE, 3), dtype=np.uint8)),
        labels=generator.integers(0, CLASSES, SAMPLES),
        kind="classification",
        label_names=tuple("abc"),
        splits={"train": np.arange(SAMPLES)},
        origins=Origins(("made",), np.zeros(SAMPLES, np.int32), np.zeros(SAMPLES, np.int64)),
        fingerprint="made",
    )


def recipe(augment: dict[str, Any], micro: int | None = None) -> Recipe:
    return driving.recipe(
        data={"augment": augment},
        loop={"batch_size": BATCH, "micro_batch_size": micro, "epochs": 2},
        optimizer={"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "decay_all": False, "clip_norm": None},
        schedule={"type": "constant", "warmup": 0},
    )


def by_engine(world: World, chosen: Recipe) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after two epochs, and the losses."""
    dataset, model, mesh = data(), network(), Mesh(data=world)
    task = task_for("classification", dataset.label_names, chosen.task)
    build = assemble_build(
        chosen, model, dataset, task, torch.device("cpu"), blocks=(), normalisation=((0.5,) * 3, (0.5,) * 3), mesh=mesh
    )
    run, course = assemble(chosen, build, STEPS, mesh=mesh), Course(chosen, dataset, build, mesh)
    at, losses = course.start, []
    for step in range(STEPS):
        done = run.engine.accumulate(course.input(at, step))
        losses.append(world.all_reduce(done.loss.clone()).item())
        run.engine.update()
        at = course.after(at)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, losses


def mixup(images: Tensor, share: float) -> tuple[Tensor, float]:
    """As torchvision's transforms.v2.MixUp."""
    return images.roll(1, 0).mul(1 - share).add(images.mul(share)), share


def cutmix(images: Tensor, share: float, row: int, column: int) -> tuple[Tensor, float]:
    """As torchvision's transforms.v2.CutMix."""
    height, width = images.shape[-2:]
    half = 0.5 * (1 - share) ** 0.5
    top, bottom = max(row - int(half * height), 0), min(row + int(half * height), height)
    left, right = max(column - int(half * width), 0), min(column + int(half * width), width)
    found = images.clone()
    found[..., top:bottom, left:right] = images.roll(1, 0)[..., top:bottom, left:right]
    return found, 1 - (bottom - top) * (right - left) / (height * width)


def by_hand(
    chosen: Recipe, mix: Callable[[Tensor, int], tuple[Tensor, float]]
) -> tuple[dict[str, Tensor], list[float]]:
    """A plain loop over the same batches.

    Args:
        mix: images and step -> images, and the share of each that is its own.
    """
    dataset, model = data(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    pixels = torch.from_numpy(dataset.inputs.pixels).permute(0, 3, 1, 2).float() / 255
    labels, losses = torch.from_numpy(dataset.labels), []
    for step in range(STEPS):
        epoch, place = divmod(step, -(-SAMPLES // BATCH))
        order = np.random.default_rng((chosen.seed, epoch)).permutation(np.arange(SAMPLES))
        ids = order[place * BATCH : (place + 1) * BATCH]
        images, share = mix((pixels[ids] - 0.5) / 0.5, step)
        soft = share * F.one_hot(labels[ids], CLASSES) + (1 - share) * F.one_hot(labels[ids].roll(1, 0), CLASSES)
        loss = F.cross_entropy(model(images), soft)  # torch's own loss of soft labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return dict(model.state_dict()), losses


def shares(augment: dict[str, Any], steps: int = 2000) -> np.ndarray:
    """The share of each step."""
    part = AugmentPart(**augment)
    return np.array([draw(part, 0, step, 32, 32).share for step in range(steps)])
