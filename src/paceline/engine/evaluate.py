"""One pass over a split without training."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from paceline.engine.engine import Engine
from paceline.records import EvaluationRecord
from paceline.seams import Build, Ids


def inferred(engine: Engine, build: Build, ids: Ids, batch_size: int) -> Iterator[tuple[Ids, Tensor]]:
    """Sample ids and logits [S, C] of every batch, in the layout's thrifty order; one batch is alive at a time."""
    ids = build.layout.sorted(ids)
    for start in range(0, len(ids), batch_size):
        chosen = ids[start : start + batch_size]
        yield chosen, engine.infer(build.layout.collate(chosen))


def evaluate(
    engine: Engine, build: Build, split: str, ids: Ids, batch_size: int, *, step: int, epoch: int
) -> EvaluationRecord:
    """Loss and metrics of a split; every sample counts once, whatever the batch size."""
    started = time.perf_counter()
    meter = build.task.meter(build.device)
    ordered = build.layout.sorted(ids)
    for start in range(0, len(ordered), batch_size):
        batch = build.layout.collate(ordered[start : start + batch_size])
        meter.update(engine.infer(batch), batch)
    return EvaluationRecord(
        split=split,
        step=step,
        epoch=epoch,
        metrics=(found := meter.compute()),
        loss=found.pop("loss"),
        samples=len(ids),
        seconds=time.perf_counter() - started,
        confusion=meter.confusion(),
    )
