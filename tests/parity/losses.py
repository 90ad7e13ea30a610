"""Runs over rare labels, by paceline's own course of steps and by a plain loop that is written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.dataset import Dataset
from paceline.prepare.assemble import assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import build_for
from paceline.recipe import Recipe
from paceline.seams import Alone, Mesh, World
from tests.parity import driving
from tests.parity.reference import CLASSES, SAMPLES, STEPS, batches, linear_schedule, padded, samples, tiny_model
from tests.testing.distributed import run_distributed

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels of a whole batch -> the scalar whose gradient is followed."""

SGD = {"type": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "decay_all": False}
"""Unlike Adam's, its updates are as small as the gradient is: rounding stays rounding."""

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
"""Between two ways of adding up the same in fp32, after twenty steps."""


def rare(kind: str = "classification") -> np.ndarray[Any, Any]:
    """Labels of the reference's samples: class indices, or 0 and 1 of each label; the last is rare."""
    rng = np.random.default_rng(5)
    if kind == "multi_label":
        return (rng.random((SAMPLES, CLASSES)) < (0.6, 0.3, 0.1)).astype(np.float32)
    return rng.choice(CLASSES, SAMPLES, p=(0.65, 0.25, 0.1)).astype(np.int64)


def dataset(kind: str = "classification") -> Dataset:
    return replace(driving.dataset(), kind=kind, labels=rare(kind))


def chosen(*, micro_batch_size: int | None = None, packing: bool = False, **parts: Any) -> Recipe:
    """The recipe of a plain run with SGD.

    Args:
        parts: of the recipe, such as ``task``.
    """
    loop = {"batch_size": 8, "micro_batch_size": micro_batch_size, **parts.pop("loop", {})}
    return driving.recipe(optimizer=SGD, loop=loop, techniques={**driving.PLAIN, "packing": packing}, **parts)


def train(
    recipe: Recipe, kind: str = "classification", world: World | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Twenty steps of the course that ``paceline train`` takes: losses of the global batch, and the weights."""
    data, mesh = dataset(kind), Mesh(data=world or Alone())
    build = build_for(recipe, tiny_model(dropout=0.0), data, torch.device("cpu"), mesh=mesh)
    run, course = assemble(recipe, build, STEPS, mesh=mesh), Course(recipe, data, build, mesh)
    losses, at = [], course.start
    for step in range(STEPS):
        loss = run.engine.accumulate(course.input(at, step)).loss
        losses.append(mesh.data.all_reduce(loss.clone()).item())
        run.engine.update()
        at = course.after(at)
    return losses, {name: value.clone() for name, value in run.engine.whole().items()}


def by_hand(
    criterion: Criterion, kind: str = "classification", micro_batch_size: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Twenty steps of a plain loop: ``loss = criterion(model(...).logits, labels)``, ``loss.backward()``.

    Args:
        micro_batch_size: takes the mean of the pieces' means, as accumulating loops do.
    """
    model, labels, texts = tiny_model(dropout=0.0), torch.from_numpy(rare(kind)), samples()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    losses = []
    model.train()
    for step, ids in enumerate(batches(8)):
        optimizer.param_groups[0]["lr"] = SGD["lr"] * linear_schedule(step, STEPS, 2)
        optimizer.zero_grad()
        pieces = np.split(ids, range(micro_batch_size or len(ids), len(ids), micro_batch_size or len(ids)))
        total = 0.0
        for piece in pieces:
            loss = criterion(model(**padded([texts[i] for i in piece])).logits, labels[piece]) / len(pieces)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def assert_same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    np.testing.assert_allclose(found[0], expected[0], **CLOSE, err_msg="the losses differ")
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, **CLOSE, msg=lambda told, name=name: f"{name}: {told}")


def differ(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    """Whether the losses are apart by far more than rounding: so that a comparison can fail."""
    return bool(np.abs(np.subtract(one[0], other[0])).max() > 1e-3)


def _on_a_rank(world: World, recipe: Recipe, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(recipe, kind, world)


def assert_no_split_matters(kind: str, **parts: Any) -> None:
    """Micro-batches of uneven size, packed rows and two ranks come to what the single padded batch comes to."""
    whole = train(chosen(**parts), kind)
    assert_same(train(chosen(micro_batch_size=3, **parts), kind), whole)
    assert_same(train(chosen(packing=True, **parts), kind), whole)
    for rank in run_distributed(_on_a_rank, 2, chosen(micro_batch_size=3, **parts), kind):
        assert_same(rank, whole)
