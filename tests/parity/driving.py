"""Drives paceline's own engine and order over the reference's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.dataset import Dataset, Origins, Tokens
from paceline.data.order import OrderState, ShuffledOrder
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.tasks import task_for
from tests.parity.reference import CLASSES, SAMPLES, STEPS, samples


def plain_dataset() -> Dataset:
    texts, labels = samples()
    lengths = [len(text) for text in texts]
    flat = np.concatenate(texts).astype(np.uint16)
    return Dataset(
        inputs=Tokens(flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), pad_id=0),
        labels=labels.astype(np.int64),
        kind="classification",
        label_names=tuple(map(str, range(CLASSES))),
        splits={"train": np.arange(SAMPLES)},
        origins=Origins(("made.csv",), np.zeros(SAMPLES, np.int32), np.arange(2, SAMPLES + 2)),
        fingerprint="made",
    )


dataset = plain_dataset
"""What runs are of, where a test puts nothing else in its place."""

PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "packing": False,
    "early_pooling": False,
    "fused_qkv": False,
    "fusion": False,
    "embedding_gradient": False,
    "channels_last": False,
    "fully_connected": False,
    "compile": False,
    "capture": False,
}
"""No technique at all: a step is that of the hand-written loop."""


def recipe(**settings: Any) -> Recipe:
    base = {
        "model": {"source": "given"},
        "data": {"source": "made.csv"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "decay_all": True},
        "schedule": {"warmup": 2},
        "techniques": PLAIN,
        "loop": {"batch_size": 8, "max_steps": STEPS},
        "device": "cpu",
    }
    return Recipe.parse({**base, **{k: {**base.get(k, {}), **v} for k, v in settings.items()}})


def assembled(model: nn.Module, chosen: Recipe, total_steps: int = STEPS, device: str = "cpu") -> Assembled:
    data = dataset()
    task = task_for(data.kind, data.label_names, chosen.task)
    blocks = list(model.distilbert.transformer.layer)
    normalisation = ((0.5,) * 3, (0.5,) * 3)
    build = assemble_build(chosen, model, data, task, torch.device(device), blocks=blocks, normalisation=normalisation)
    return assemble(chosen, build, total_steps)


def train(
    run: Assembled, chosen: Recipe, steps: int = STEPS, start: OrderState | None = None, first: int = 0
) -> list[float]:
    """``steps`` steps through engine and order; returns the losses."""
    loop = chosen.loop
    order = ShuffledOrder(np.arange(SAMPLES), micro_batch_size=loop.micro_batch_size or loop.batch_size)
    at = start or OrderState(seed=chosen.seed, epoch=0, step=0, batch_size=loop.batch_size)
    labels = samples()[1]
    losses = []
    for step in range(first, first + steps):
        plan = order.plan(at)
        counted = run.build.task.count(labels[plan.samples])
        done = run.engine.accumulate_batches(
            (run.build.layout.collate(ids) for ids in plan.microbatches), counted, step=step
        )
        run.engine.update()
        losses.append(done.loss.item())
        at = order.after(at)
    return losses


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    different = [
        name
        for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True)
        if not torch.equal(a, b)
    ]
    assert not different, f"weights differ: {different[:4]}"
