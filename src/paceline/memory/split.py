"""``loop.on_oom: split``: what does not fit is done again in smaller micro-batches, by all ranks alike.

A step changes nothing but gradients and running statistics until its update, and the sums of gradients are whole before
any rank begins that. So a rank that runs out of memory takes part in the sums with nothing, all ranks learn of it
together, and all of them go back to where the step began: same samples, same order, same denominator.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from paceline.distributed.exchange import named
from paceline.engine.engine import Engine
from paceline.errors import RecipeError
from paceline.memory.exhausted import place_of
from paceline.recipe import Recipe
from paceline.seams import World

Result = TypeVar("Result")

Split = Callable[[str], bool]
"""Told who ran out of memory where, makes micro-batches smaller; False where they cannot be."""


def retried(
    work: Callable[[], Result], engine: Engine, world: World, split: Split, *, step: int, total_steps: int
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


def check_split(recipe: Recipe, *, is_sharded: bool) -> None:
    """Refuse ``on_oom: split`` where it can do nothing.

    Raises:
        RecipeError: the weights are sharded, or no step is made.
    """
    if recipe.loop.on_oom == "fail":
        return
    what, fix = "loop.on_oom = split: has no effect", "--set loop.on_oom=fail"
    if recipe.model.train == "features":
        raise RecipeError(what, "model.train = features makes no step that could be split", fix)
    if is_sharded:
        why = "ranks that share weights meet in every block, and one that is out of memory leaves the others waiting"
        raise RecipeError(what, why, f"{fix}, or --set parallel.strategy=ddp")
