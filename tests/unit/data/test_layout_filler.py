"""Micro-batches without a sample: one shape, weight 0, loss 0, gradient 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.dataset import Images, Tokens
from paceline.data.layout import ImageLayout, PackedLayout, PaddedLayout
from paceline.recipe.parts import TaskPart
from paceline.seams import Layout
from paceline.tasks import task_for

CPU = torch.device("cpu")
NONE = np.arange(0)
LENGTHS = np.array([5, 3, 9])
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 1), dtype=np.uint8)
KINDS = ("padded", "packed", "images")
LABELS = {
    "classification": np.array([2, 1, -1]),
    "multi_label": np.ones((3, 3), dtype=np.float32),
    "regression": np.array([0.5, np.nan, 1.0], dtype=np.float32),
}


def layout_of(kind: str, labels: np.ndarray, resident: bool = False, lengths: np.ndarray = LENGTHS) -> Layout:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Tokens(np.arange(10, 10 + offsets[-1], dtype=np.uint16), offsets, 0)
    if kind == "images":
        return ImageLayout(Images(PIXELS), labels, CPU, mean=(0.5,), deviation=(0.5,), resident=resident)
    if kind == "padded":
        return PaddedLayout(tokens, labels, CPU, token_types=False, bucket=8, resident=resident)
    return PackedLayout(tokens, labels, CPU, token_types=False, first_position=0, bucket=8, resident=resident)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_its_size_is_what_is_computed_for_no_sample(kind: str, resident: bool) -> None:
    layout = layout_of(kind, LABELS["classification"], resident)
    batch, size = layout.collate(NONE), layout.size(NONE)
    slots = {"padded": 8, "packed": 8, "images": 2}[kind]
    assert (size.samples, size.tokens, size.slots) == (0, 0, slots)
    given = next(iter(batch.inputs.values()))
    assert (given.shape[0] if kind == "images" else given.numel()) == slots
    assert not batch.weights.any()
    assert not batch.labels.any()
    again = layout.collate(NONE, draw=3)
    assert {name: value.shape for name, value in again.inputs.items()} == {n: v.shape for n, v in batch.inputs.items()}
    assert layout.sorted(NONE).shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", LABELS)
def test_loss_and_gradients_are_zero_whatever_the_labels_say(kind: str, task: str) -> None:
    batch = layout_of(kind, LABELS[task]).collate(NONE)
    head = task_for(task, ("v",) if task == "regression" else ("a", "b", "c"), TaskPart())
    samples = len(batch.labels)
    weight = nn.Parameter(torch.ones(samples, head.num_outputs))
    logits = weight * torch.arange(1.0, head.num_outputs + 1)
    loss = head.loss_sum(logits, batch)
    (gradient,) = torch.autograd.grad(loss, [weight])
    assert loss.item() == 0
    assert not gradient.any()
    assert head.correct(logits, batch).item() == 0


def test_batch_normalisation_trains_on_it_down_to_one_position() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    batch = layout_of("images", LABELS["classification"]).collate(NONE)
    loss = task_for("classification", ("a", "b", "c"), TaskPart()).loss_sum(model(batch.inputs["pixel_values"]), batch)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, list(model.parameters())))


def test_a_text_of_no_tokens_never_stands_in() -> None:
    layout = layout_of("padded", LABELS["classification"], lengths=np.array([0, 3, 9]))
    assert layout.collate(NONE).inputs["attention_mask"].sum() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_reading_ahead_passes_over_it(kind: str) -> None:
    layout: Any = layout_of(kind, LABELS["classification"])
    expected: list[Any] = []
    layout._ahead.expect = expected.extend
    layout.expect([np.array([1]), NONE, np.array([0, 2])])
    assert [ids.tolist() for ids in expected] == [[1], [0, 2]]
