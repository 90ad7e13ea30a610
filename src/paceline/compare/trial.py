"""Results that can be compared: of a copy of the model, exact, without dropout, on a few samples."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.compare.rounding import Results
from paceline.machine.device import matmul_precision
from paceline.seams import Batch, Forward, Ids, Layout, Task

CHECKED_SAMPLES = 8
"""Samples, at most, that two ways are compared on."""


@contextlib.contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Full fp32, gradients on, and random numbers as they were on the way out."""
    gpus = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=gpus),
        matmul_precision("fp32"),
        torch.autocast(device.type, enabled=False),
        torch.enable_grad(),
    ):
        yield


def trial_of(model: nn.Module) -> Any:
    """A copy to try something on, in evaluation mode, with weights in fp32 or better."""
    trial = copy.deepcopy(model).eval()
    return trial if next(trial.parameters()).dtype in (torch.float32, torch.float64) else trial.float()


def spread(layout: Layout, ids: Ids) -> Ids:
    """A few of the ids, from the shortest sample to the longest."""
    lengths = np.array([layout.size(ids[i : i + 1]).tokens for i in range(len(ids))])
    ranks = np.unique(np.linspace(0, len(ids) - 1, CHECKED_SAMPLES).round().astype(np.int64))
    return ids[np.argsort(lengths, kind="stable")[ranks]]


def results(model: nn.Module, forward: Forward, task: Task, batch: Batch) -> Results:
    """Logits, and the gradient of each trained parameter; the model's own gradients stay as they are."""
    logits = forward(model, batch)
    if not logits.requires_grad:
        return Results(logits, {})
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = task.loss_sum(logits, batch)
    # a parameter that the loss does not depend on has no gradient, which is as good as a gradient of zero
    found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return Results(logits.detach(), dict(zip(trained, found, strict=True)))
