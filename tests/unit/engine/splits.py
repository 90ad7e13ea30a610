"""Splits to evaluate: a real layout of ragged texts, real tasks, and a model of a few weights."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.contract.records import EvaluationRecord
from paceline.data.dataset import Tokens
from paceline.data.padded_layout import PaddedLayout
from paceline.engine.evaluate import evaluate, inference
from paceline.recipe.parts import TaskPart
from paceline.seams import Alone, Batch, Build, World
from paceline.tasks import task_for

METRICS = {
    "classification": ("accuracy", "f1", "precision", "recall", "auroc", "mcc"),
    "multi_label": ("accuracy", "exact_match", "f1", "precision", "recall", "auroc"),
    "regression": ("mse", "mae", "r2", "pearson", "spearman"),
}
"""Every metric that paceline knows, by task."""

SUMS = {
    "classification": ("accuracy", "f1", "precision", "recall", "mcc"),
    "multi_label": ("accuracy", "exact_match", "f1", "precision", "recall"),
    "regression": ("mse", "mae", "r2"),
}
"""Those that need no scores."""

OWN = f"{__name__}:own_metric"
"""A user's metric; its value depends on the order of the samples, and so shows it."""


def own_metric(scores: Tensor, labels: Tensor) -> Tensor:
    """Weighs each sample by its place."""
    places = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    return (places * scores.double().reshape(len(scores), -1)[:, 0]).sum() + labels.double().mean()


def failing_metric(scores: Tensor, labels: Tensor) -> Tensor:
    """A user's mistake."""
    raise LookupError("no such column")


@dataclass(frozen=True)
class Split:
    """A split of ``size`` samples with labels of ``kind``."""

    kind: str
    size: int
    classes: int = 3
    seed: int = 0
    metrics: tuple[str, ...] = ()
    broken: float = 0.0
    """Added to the logits of the longest samples."""

    def build(self) -> Build:
        """The same on every rank."""
        random = np.random.default_rng((self.seed, self.size))
        lengths = random.integers(2, 40, self.size)
        flat = random.integers(5, 60, int(lengths.sum()) + 40, dtype=np.uint16)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        labels: Any = {
            "classification": lambda: random.integers(0, self.classes, self.size),
            "multi_label": lambda: random.integers(0, 2, (self.size, self.classes)).astype(np.float32),
            "regression": lambda: random.normal(size=self.size).astype(np.float32),
        }[self.kind]()
        names = tuple("abcdefghij"[: 1 if self.kind == "regression" else self.classes])
        task = task_for(self.kind, names, TaskPart(metrics=self.metrics or (*METRICS[self.kind], OWN)))
        device = torch.device("cpu")
        layout = PaddedLayout(Tokens(flat, offsets, pad_id=0), labels, device, token_types=False)
        generator = torch.Generator().manual_seed(self.seed)
        model = nn.Sequential(nn.Embedding(60, 8, padding_idx=0), nn.Linear(8, task.num_outputs))
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        forward = partial(logits, broken=self.broken, longest=int(lengths.max(initial=0)))
        return Build(model=model, forward=forward, layout=layout, task=task, device=device)

    def evaluate(self, batch_size: int, world: World | None = None) -> EvaluationRecord:
        """The record of the whole split."""
        build = self.build()
        ids = np.arange(self.size)
        return evaluate(inference(build), build, "test", ids, batch_size, step=3, epoch=1, world=world or Alone())


def logits(model: nn.Module, batch: Batch, *, broken: float, longest: int) -> Tensor:
    """Of the mean embedding; ``broken`` is added to the logits of samples of ``longest`` tokens."""
    embedded, last = model.children()
    mask = batch.inputs["attention_mask"]
    means = (embedded(batch.inputs["input_ids"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    found: Tensor = last(means)
    return torch.where((mask.sum(1) == longest)[:, None], found + broken, found)


def bits(record: EvaluationRecord) -> dict[str, Any]:
    """All of a record but its time, floats as their bits, so that NaN equals itself."""
    as_bits = {name: struct.pack("d", value) for name, value in {"loss": record.loss, **record.metrics}.items()}
    return {**as_bits, "confusion": record.confusion, "samples": record.samples, "at": (record.step, record.epoch)}
