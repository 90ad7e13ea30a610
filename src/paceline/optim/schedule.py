"""Learning rates as a table [steps, groups], computed before the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.contract.references import resolve, users_code
from paceline.recipe.parts import OptimizerPart, SchedulePart


def factors(part: SchedulePart, total_steps: int) -> NDArray[np.float64]:
    """[total_steps]: factor of the base rate at each update.

    The formulas of transformers' schedules, and of torch's ``OneCycleLR`` with ``three_phase=False``, whose cycling of
    the momentum is left out.

    Raises:
        RecipeError: warm-up as long as the run, or a user's schedule that gives no finite number of at least 0.

    Example:
        >>> table = factors(SchedulePart(type="one_cycle"), total_steps=1000)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: table[min(step, 999)])
    """
    warmup = round(part.warmup * total_steps) if 0 < part.warmup < 1 else int(part.warmup)
    if warmup >= total_steps and warmup > 0 and part.warmup >= 1:
        raise RecipeError(
            f"schedule.warmup = {part.warmup}",
            f"the whole run has only {total_steps} steps",
            f"--set schedule.warmup={max(0, total_steps // 10)}",
        )
    step = np.arange(total_steps, dtype=np.float64)
    rising = step / max(1, warmup)
    left = (total_steps - step) / max(1, total_steps - warmup)
    match part.type:
        case "constant":
            after = np.ones_like(step)
        case "linear":
            after = part.floor + (1 - part.floor) * left
        case "cosine":
            after = _half_cosine(1 - left, 1.0, part.floor)
        case "cosine_restarts":
            after = _half_cosine(part.cycles * (1 - left) % 1.0, 1.0, part.floor)
        case "one_cycle":
            return _one_cycle(part, step)
        case "inverse_sqrt":
            timescale = part.timescale or warmup or 10_000
            # 1 where the warm-up ends; before it, what stands here is not used
            after = 1 / np.sqrt(np.maximum(step - warmup + timescale, 1) / timescale)
        case _:
            return _users(part.type, total_steps)
    return np.where(step < warmup, rising, after)


def _half_cosine(share: NDArray[np.float64], start: float, end: float) -> NDArray[np.float64]:
    """From ``start`` where ``share`` is 0 to ``end`` where it is 1."""
    return end + (start - end) * 0.5 * (1 + np.cos(np.pi * share))


def _one_cycle(part: SchedulePart, step: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smith and Topin, Super-Convergence, 2018: up along half a cosine, and down along another to the last step."""
    last = len(step) - 1
    # as torch has it, the top may lie between two steps
    top = (part.warmup * len(step) if part.warmup < 1 else part.warmup) - 1
    up = _half_cosine(step / top, 1 / part.div_factor, 1.0) if top > 0 else np.ones_like(step)
    down = _half_cosine((step - top) / max(last - top, 1e-9), 1.0, part.floor)
    return np.where(step <= top, up, down)


def rate_table(
    base_rates: Sequence[float], parts: Sequence[SchedulePart], total_steps: int, scaling: float = 1.0
) -> NDArray[np.float64]:
    """[total_steps, groups]: the learning rate of each group at each applied update.

    Args:
        base_rates: largest rate of each group.
        parts: schedule of each group; its warm-up rises to the scaled rate.
        total_steps: updates of the run.
        scaling: multiplies every rate; ``lr_factor``.

    Raises:
        RecipeError: a rate that fp32 cannot hold; and as ``factors``.
    """
    columns = [rate * scaling * factors(part, total_steps) for rate, part in zip(base_rates, parts, strict=True)]
    rates = np.stack(columns, axis=1)
    if (highest := rates.max(initial=0)) > np.finfo(np.float32).max:
        raise RecipeError(
            f"a learning rate of {highest:g}",
            "optimizer.lr times what scales it is no number that fp32 has",
            "--set optimizer.lr=5e-5, and optimizer.lr_scaling=none",
        )
    return rates


def lr_factor(part: OptimizerPart, batch_size: int) -> float:
    """What learning rates are multiplied by for a global batch of ``batch_size``.

    Linear: Goyal et al., Accurate, Large Minibatch SGD, 2017, with a warm-up to the scaled rate. Square root, which
    keeps the variance of an update: Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014;
    Hoffer et al., Train longer, generalize better, NeurIPS 2017.
    """
    if isinstance(part.lr_scaling, float):
        return part.lr_scaling
    ratio = batch_size / (part.lr_scaling_base or batch_size)
    return math.sqrt(ratio) if part.lr_scaling == "sqrt" else ratio


def lr_decision(part: OptimizerPart, batch_size: int) -> Decision | None:
    """What became of the learning rate, for people to see; None where scaling is off.

    A rule at its own base says that it multiplies by 1: the recipe is meant for other batches too.
    """
    if part.lr_scaling == "none":
        return None
    if isinstance(part.lr_scaling, float):
        source = "a factor of your own"
    else:
        source = f"{part.lr_scaling}: global batch {batch_size} over {part.lr_scaling_base}"
    rates = f"learning rate {part.lr:g}" + (", and that of every group," if part.groups else "")
    reason = f"{rates} x {lr_factor(part, batch_size):.4g} ({source})"
    return Decision(setting="optimizer.lr_scaling", value=str(part.lr_scaling), reason=reason)


def _users(reference: str, total_steps: int) -> NDArray[np.float64]:
    function = resolve(reference, "schedule.type", ("step", "total_steps"))
    with users_code(f"schedule.type = {reference}"):
        values = np.array([float(function(step, total_steps)) for step in range(total_steps)])
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise RecipeError(
            f"schedule.type = {reference}",
            f"it gave {values[bad[0]]} for step {bad[0]} of {total_steps}",
            "return a finite factor of at least 0",
        )
    return values
