"""One pass over a split without training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.records import EvaluationRecord
from paceline.seams import Batch, Build, Ids

Infer = Callable[[Batch], Tensor]
"""Batch -> logits, in evaluation mode, without gradients: an engine's ``infer``."""


def inference(build: Build) -> Infer:
    """``infer`` of a build that is not trained."""
    build.model.eval()

    @torch.no_grad()
    def infer(batch: Batch) -> Tensor:
        return build.forward(build.model, batch)

    return infer


def evaluate(
    infer: Infer, build: Build, split: str, ids: Ids, batch_size: int, *, step: int, epoch: int
) -> EvaluationRecord:
    """Loss and metrics of a split; every sample counts once, whatever the batch size."""
    started = time.perf_counter()
    meter = build.task.meter(build.device)
    ordered = build.layout.sorted(ids)
    pieces = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    build.layout.expect(pieces)
    for piece in pieces:
        batch = build.layout.collate(piece)
        meter.update(infer(batch), batch)
    found = meter.compute()
    return EvaluationRecord(
        split=split,
        step=step,
        epoch=epoch,
        loss=found.pop("loss"),
        metrics=found,
        samples=len(ids),
        seconds=time.perf_counter() - started,
        confusion=meter.confusion(),
    )
