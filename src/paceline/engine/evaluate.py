"""One pass over a split without training, shared out among the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.contract.records import EvaluationRecord
from paceline.contract.spans import activity
from paceline.data.order import split_evenly
from paceline.seams import Alone, Batch, Build, Ids, Layout, Meter, World

Infer = Callable[[Batch], Tensor]
"""Batch -> logits, in evaluation mode, without gradients: an engine's ``infer``."""

Agree = Callable[[], None]
"""Called by all ranks at the same places; raises on all of them, or on none."""

_ALONE = Alone()


def inference(build: Build) -> Infer:
    """``infer`` of a build that is not trained."""
    build.model.eval()

    @torch.no_grad()
    def infer(batch: Batch) -> Tensor:
        return build.forward(build.model, batch)

    return infer


@activity("evaluating")
def evaluate(
    infer: Infer,
    build: Build,
    split: str,
    ids: Ids,
    batch_size: int,
    *,
    step: int,
    epoch: int,
    world: World = _ALONE,
    agree: Agree = lambda: None,
    meter: Meter | None = None,
) -> EvaluationRecord:
    """Loss and metrics of a split; every sample counts once, whatever the batch size and the number of ranks.

    Ranks share out the very batches of one process, and what they add up to is put together in the order of the split.
    N ranks so return what one returns, to the bit, wherever the machine computes a batch to the same bits twice.

    All ranks call ``infer`` equally often, so it may hold collectives, and must not raise on one rank alone: the others
    would wait for it. What breaks an evaluation off is agreed upon inside ``infer`` (``world.any``) or waits for its
    end.

    Args:
        infer: of the engine.
        build: whose layout and task are used.
        split: its name, for the record.
        ids: all samples of the split, the same on every rank.
        batch_size: samples of one forward pass.
        step: updates made so far. epoch: that they end in.
        world: the ranks. agree: asked after the last batch, before what the ranks found is put together.
        meter: a fresh one in place of the task's.

    Returns:
        The same record on every rank; ``seconds`` are those of the slowest.

    Raises:
        RecipeError: a metric of the user's fails, which all ranks raise; or a loss, on the rank where it does.
    """
    started = time.perf_counter()
    meter = meter or build.task.meter(build.device)
    mine, places = _share(build, ids, batch_size, world)
    build.layout.expect(mine)
    for number, batch in enumerate(map(build.layout.collate, mine)):
        logits = infer(batch)
        if number < len(places):
            meter.update(logits, batch)
    agree()
    meter.merge(world, places)
    found, notices = _computed(meter, world)
    return EvaluationRecord(
        split=split,
        step=step,
        epoch=epoch,
        loss=found.pop("loss"),
        metrics=found,
        samples=len(ids),
        seconds=max(world.gather(time.perf_counter() - started)),
        confusion=meter.confusion(),
        notices=notices,
    )


def largest_batch(
    layout: Layout, splits: Mapping[str, Ids], batch_size: int, names: Collection[str] = ("validation", "test")
) -> Ids | None:
    """The batch with the most positions among those of all evaluations of a run; None where it has none."""
    evaluated = [splits[name] for name in names if name in splits]
    pieces = [piece for ids in evaluated for piece in layout.batches(ids, batch_size)]
    return max(pieces, key=lambda piece: layout.size(piece).slots, default=None)


def _share(build: Build, ids: Ids, batch_size: int, world: World) -> tuple[list[Ids], list[int]]:
    """This rank's batches, equally many on all ranks, and the places in the split of those that count.

    A rank without a batch of its own in the last round runs the split's last one too: nobody takes in the result.
    """
    pieces = build.layout.batches(ids, batch_size)
    slots = np.array([build.layout.size(piece).slots for piece in pieces], dtype=np.int64)
    places: list[int] = np.flatnonzero(split_evenly(slots, world.size) == world.rank).tolist()
    rounds = -(-len(pieces) // world.size)
    return [pieces[place] for place in places] + pieces[-1:] * (rounds - len(places)), places


def _computed(meter: Meter, world: World) -> tuple[dict[str, float], tuple[str, ...]]:
    """The first rank's results and notices, on every rank.

    Scores are held once, and a metric that draws numbers draws them once.

    Raises:
        RecipeError: a metric of the user's fails; on every rank, so that none waits for a result that never comes.
    """
    found: dict[str, float] = {}
    notices: tuple[str, ...] = ()
    failed = None
    if world.is_first:
        try:
            found, notices = meter.compute(), meter.notices()
        except RecipeError as error:
            failed = error
    results, notices, reason = world.share((found, notices, (failed.what, failed.why, failed.fix) if failed else None))
    if reason:
        raise failed or RecipeError(*reason)
    return dict(results), tuple(notices)
