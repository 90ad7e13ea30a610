"""``loop.on_oom: split``: what does not fit is done again in smaller batches, by all ranks alike.

A step changes nothing but gradients and running statistics until its update, and the sums of gradients are whole before
any rank begins that. So a rank that runs out of memory takes part in the sums with nothing, all ranks learn of it
together, and all of them go back to where the step began: same samples, same order, same denominator. An evaluation
changes nothing at all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.contract.records import EvaluationRecord
from paceline.contract.spans import activity
from paceline.engine.evaluate import Infer, evaluate
from paceline.machine.cluster import named
from paceline.machine.device import is_gpu
from paceline.memory.exhausted import place_of
from paceline.recipe import Recipe
from paceline.seams import Batch, Build, Ids, Meter, Retrying, World

Result = TypeVar("Result")

Split = Callable[[str], bool]
"""Told who ran out of memory where, makes micro-batches smaller; False where they cannot be."""


def retried(
    work: Callable[[], Result], engine: Retrying, world: World, split: Split, *, step: int, total_steps: int
) -> Result:
    """What ``work`` returns, which begins anew with smaller micro-batches as often as a rank runs out of memory.

    A collective: all ranks call it, and begin anew together.

    Args:
        work: accumulates a step, or warms up; it asks anew for the micro-batches each time.
        engine: what it works on.
        step: that is under way, from 1.

    Raises:
        torch.OutOfMemoryError: micro-batches cannot be smaller, or other ranks were already adding up this one's
            gradients; on the ranks whose memory it was.
        LostRank: the same, on the others.
    """
    while True:
        go_back = engine.mark()
        failed: torch.OutOfMemoryError | None = None
        try:
            result = work()
        except torch.OutOfMemoryError as error:
            failed = error
        if failed is not None:
            let_go(failed)
            engine.catch_up(failed)
        if not world.any(failed is not None):
            return result
        result = None  # type: ignore[assignment]
        go_back()
        places = world.gather(place_of(failed, step, total_steps) if failed is not None else None)
        ranks = [rank for rank, place in enumerate(places) if place is not None]
        who = f"{named(ranks)} ran out of memory" if world.size > 1 else "out of memory"
        if not split(f"{who} {places[ranks[0]]}"):
            if failed is not None:
                raise failed
            world.barrier("what follows a rank's want of memory")  # which announces its failure instead


@activity("evaluating")
def evaluate_fitting(
    infer: Infer,
    build: Build,
    split: str,
    ids: Ids,
    batch_size: int,
    *,
    step: int,
    epoch: int,
    world: World,
    split_to: Callable[[int, str], None],
    meter: Callable[[], Meter] | None = None,
) -> EvaluationRecord:
    """``evaluate``, begun anew with half the batch as often as a rank runs out of memory.

    A collective: all ranks call it, and begin anew together.

    Args:
        infer ... world: as ``evaluate`` has them.
        split_to: told the smaller batch, and what is to be said of it, on every rank.
        meter: makes those that take the place of the task's.

    Raises:
        torch.OutOfMemoryError: not even one sample fits, or on several ranks it was not a forward pass; on the ranks
            whose memory it was.
        LostRank: the same, on the others.
    """
    while True:
        guarded = _Guarded(infer, build.task.num_outputs, world)
        failed: torch.OutOfMemoryError | None = None
        try:
            at: dict[str, Any] = {"step": step, "epoch": epoch, "meter": meter() if meter else None}
            return evaluate(guarded, build, split, ids, batch_size, **at, world=world, agree=guarded.agree)
        except _SomeRankFull:
            failed = guarded.error
        except torch.OutOfMemoryError as error:
            if world.size > 1:  # the others are still in the evaluation
                raise
            failed = error
        if failed is not None:
            let_go(failed)
        full = [rank for rank, is_full in enumerate(world.gather(failed is not None)) if is_full]
        before = min(batch_size, len(ids))
        if before == 1:
            if failed is not None:
                raise failed
            world.barrier("what follows a rank's want of memory")  # which announces its failure instead
        batch_size = -(-before // 2)
        if is_gpu(build.device):
            torch.get_device_module(build.device).empty_cache()
        who = f"{named(full)} ran out of memory" if world.size > 1 else "out of memory"
        given = f"loop.evaluation_batch_size {before} -> {batch_size}{' on every rank' if world.size > 1 else ''}"
        told = f"{who} in an evaluation: {given}, and it is made again; its results are the same up to rounding"
        split_to(batch_size, told)


class _SomeRankFull(Exception):
    """A rank ran out of memory in an evaluation; raised on all of them."""


@final
class _Guarded:
    """``infer`` that does not fail on one rank alone: all learn of it at the next batch, or at the end."""

    def __init__(self, infer: Infer, num_outputs: int, world: World) -> None:
        self._infer, self._num_outputs, self._world = infer, num_outputs, world
        self.error: torch.OutOfMemoryError | None = None

    def __call__(self, batch: Batch) -> Tensor:
        self.agree()
        try:
            return self._infer(batch)
        except torch.OutOfMemoryError as error:
            self.error = error
        let_go(self.error)
        return torch.zeros(batch.num_samples, self._num_outputs, device=batch.labels.device)  # which nobody will see

    def agree(self) -> None:
        if self._world.any(self.error is not None):
            raise _SomeRankFull


def let_go(error: BaseException) -> None:
    """Forget what the functions held that an error came through: the activations, above all."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__


def halved(recipe: Recipe, num_samples: int, world_size: int) -> Recipe | None:
    """The recipe with half the micro-batch, rounded up; None where a rank has one sample at a time already.

    Args:
        num_samples: of the training split: the batch may have fewer than the recipe says.
        world_size: ranks that share the batch; a rank's share may be less than the recipe's micro-batch.
    """
    largest = largest_share(recipe, num_samples, world_size)
    if largest == 1:
        return None
    return recipe.with_settings([f"loop.micro_batch_size={-(-largest // 2)}"])


def largest_share(recipe: Recipe, num_samples: int, world_size: int) -> int:
    """Samples of a micro-batch, at most."""
    loop = recipe.loop
    share = -(-min(loop.batch_size, num_samples) // world_size)
    return min(loop.micro_batch_size or share, share)


def check_split(recipe: Recipe, why_not_retried: str) -> None:
    """Refuse ``on_oom: split`` where it can do nothing.

    Args:
        why_not_retried: what keeps a step from being made again, as the run's strategy says; empty where it can be.

    Raises:
        RecipeError: a step cannot be made again, or none is made.
    """
    if recipe.loop.on_oom == "fail":
        return
    what, fix = "loop.on_oom = split: has no effect", "--set loop.on_oom=fail"
    if recipe.model.train == "features":
        raise RecipeError(what, "model.train = features makes no step that could be split", fix)
    if why_not_retried:
        raise RecipeError(what, why_not_retried, f"{fix}, or share the run in another way (parallel)")
