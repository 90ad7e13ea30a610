"""Runs of a tiny transformer on any number of ranks: the same samples, split by the order; losses in fp64."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.order import OrderState, ShuffledOrder
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Batch, Mesh, Meter, Task, Update, World
from paceline.techniques.compile import apply_compile
from tests.parity import driving
from tests.parity.reference import CLASSES, SAMPLES, tiny_model

UNCOUNTED = -100
"""A label that no loss is taken of."""

LENGTHS = driving.dataset().inputs.lengths


@final
class Exact(Task):
    """Cross-entropy in the logits' own number format; paceline's tasks take theirs in fp32."""

    kind, label_names = "classification", tuple(map(str, range(CLASSES)))
    metric_names, best_metric, needs_scores = ("loss",), "-loss", False

    def count(self, labels: np.ndarray) -> int:
        return int((labels != UNCOUNTED).sum())

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(logits, batch.labels, reduction="none", ignore_index=UNCOUNTED)
        return (losses * batch.weights).sum()

    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((logits.argmax(-1) == batch.labels) * batch.weights).sum()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def logits(self, probabilities: Tensor) -> Tensor:
        raise NotImplementedError

    def meter(self, device: torch.device) -> Meter:
        raise NotImplementedError


def assembled(
    world: World,
    chosen: Recipe,
    *,
    model: nn.Module | None = None,
    labels: np.ndarray | None = None,
    compiled: str | Any = "",
    steps: int = 20,
    **more: Any,
) -> Assembled:
    """An engine in fp64 over the reference's samples, as one rank of ``world``.

    Args:
        labels: in place of the reference's.
        compiled: backend of ``torch.compile`` for the blocks.
    """
    model = (model or tiny_model(dropout=0.0)).double()
    data = driving.dataset()
    data = data if labels is None else replace(data, labels=labels)
    blocks = list(model.distilbert.transformer.layer)
    mesh = Mesh.over(world)
    build = assemble_build(
        chosen,
        model,
        data,
        Exact(),
        torch.device("cpu"),
        blocks=blocks,
        normalisation=((0.5,) * 3, (0.5,) * 3),
        mesh=mesh,
    )
    if compiled:
        apply_compile(blocks, backend=compiled)
    return assemble(chosen, build, steps, mesh=mesh, **more)


def order_of(chosen: Recipe) -> ShuffledOrder:
    size = chosen.loop.micro_batch_size or chosen.loop.batch_size
    return ShuffledOrder(np.arange(SAMPLES), micro_batch_size=size, lengths=LENGTHS)


def accumulate(run: Assembled, chosen: Recipe, world: World, step: int, at: OrderState, labels: np.ndarray) -> Tensor:
    """This rank's share of a step; returns its share of the loss."""
    plan = order_of(chosen).plan(at, world.rank, world.size)
    counted = run.build.task.count(labels[plan.samples])
    batches = (run.build.layout.collate(ids) for ids in plan.microbatches)
    return run.engine.accumulate_batches(batches, counted, step=step).loss


def train(
    run: Assembled, chosen: Recipe, world: World, steps: int, labels: np.ndarray | None = None
) -> tuple[list[float], list[dict[str, Tensor]], list[Update]]:
    """Steps from the front of the order: losses over all ranks, gradients of each step, updates."""
    labels = driving.dataset().labels if labels is None else labels
    order = order_of(chosen)
    at = OrderState(seed=chosen.seed, epoch=0, step=0, batch_size=chosen.loop.batch_size)
    losses, gradients, updates = [], [], []
    for step in range(steps):
        loss = accumulate(run, chosen, world, step, at, labels)
        losses.append(world.all_reduce(loss.clone()).item())
        named = run.build.model.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        updates.append(run.engine.update())
        at = order.after(at)
    return losses, gradients, updates


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, over the largest number of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in expected.items()
        if value.is_floating_point()
    )


def checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
