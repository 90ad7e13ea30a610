"""The learning-rate range test: a few steps whose rate grows from far too small to far too large.

Source: Smith, Cyclical Learning Rates for Training Neural Networks, arXiv 1506.01186; rates that grow exponentially
and a smoothed loss are fastai's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError
from paceline.contract.files import compiled_folder
from paceline.contract.records import Decision
from paceline.contract.stopwatch import Stopwatch
from paceline.engine.compile_cache import kept_cache
from paceline.engine.numerics import numerics
from paceline.machine.facts import Facts
from paceline.memory.exhausted import Situation, explained
from paceline.optim.schedule import lr_factor
from paceline.prepare.assemble import Assembled, assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import prepare_run
from paceline.recipe import Recipe
from paceline.seams import Mesh

DIVERGED: Final = 4.0
"""Times its lowest value that the running loss may reach."""

KEPT: Final = 0.9
"""Share that the running loss keeps of itself at each step."""

FLAT: Final = 0.02
"""Share of the first losses that the smoothed loss has to fall by, for a rate to be suggested."""


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """What the losses were as the learning rate grew."""

    name: str
    optimizer: str
    rates: tuple[float, ...]
    """``optimizer.lr`` of each step, before ``lr_scaling``; groups with their own rate have theirs, grown as much."""
    losses: tuple[float, ...]
    """Mean loss of the batch of each step, before its update."""
    ended: str
    """Why there was no further step."""
    smoothed: tuple[float, ...] = field(init=False)
    """The losses' centred mean over a tenth of the steps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "smoothed", tuple(centred(np.array(self.losses)).tolist()))

    @property
    def lowest(self) -> int | None:
        """The step with the lowest smoothed loss; None where the loss hardly fell."""
        if len(self.smoothed) < 3:
            return None
        at = int(np.argmin(self.smoothed))
        return at if self.smoothed[at] < (1 - FLAT) * self.smoothed[0] else None

    @property
    def steepest(self) -> float | None:
        """The rate at which the smoothed loss falls fastest over the rate's logarithm; None where it hardly fell."""
        if self.lowest is None:
            return None
        slopes = np.gradient(np.array(self.smoothed), np.log(self.rates))
        return self.rates[int(np.argmin(slopes[: self.lowest + 1]))]

    @property
    def tenth_of_lowest(self) -> float | None:
        """A tenth of the rate with the lowest smoothed loss; None where it hardly fell."""
        return None if self.lowest is None else self.rates[self.lowest] / 10

    @property
    def suggestion(self) -> float | None:
        """``steepest``, but no more than ``tenth_of_lowest``: the more careful of two rules of thumb."""
        if self.steepest is None or self.tenth_of_lowest is None:
            return None
        return min(self.steepest, self.tenth_of_lowest)

    @property
    def rule(self) -> str:
        """Which of the two the suggestion follows; empty where there is none."""
        if self.suggestion is None:
            return ""
        return "steepest descent" if self.suggestion == self.steepest else "a tenth of the rate with the lowest loss"


def centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a tenth of the values around each, fewer at the ends: it does not lag, as a running mean does."""
    reach = max(1, len(values) // 20)
    return np.array([values[max(0, at - reach) : at + reach + 1].mean() for at in range(len(values))])


def measure_rates(
    recipe: Recipe,
    decisions: tuple[Decision, ...],
    facts: Facts,
    *,
    first: float,
    last: float,
    steps: int,
    tell: Callable[[str], None],
    stepped: Callable[[int], None] = lambda _: None,
) -> RateRange:
    """Make steps of a run with growing rates, in the order in which the run would take its samples.

    The weights that change are those of this process; nothing is written.

    Args:
        recipe: as ``choose`` made it for one process.
        decisions: those of ``choose``.
        first, last: ``optimizer.lr`` of the first and the last step; ``lr_scaling`` multiplies it, as in a run.
        steps: at most; fewer where the loss diverges.
        tell: receives notices about data and model.
        stepped: told of each step, from 1.

    Raises:
        UserError: what ``train`` would say of the recipe.
    """
    with contextlib.ExitStack() as stack:
        numeric = numerics(recipe.techniques.precision, deterministic=recipe.deterministic, device=recipe.device)
        stack.enter_context(numeric)
        if recipe.device == "cuda" and recipe.techniques.compile is not False:
            stack.enter_context(kept_cache(compiled_folder()))
        stack.enter_context(explained(partial(_situation, recipe)))
        prepared = prepare_run(recipe, decisions, facts=facts, watch=Stopwatch())
        stack.callback(prepared.build.close)
        for notice in (*prepared.dataset.notices, *prepared.build.notices):
            tell(notice)
        recipe = prepared.recipe
        course = Course(recipe, prepared.dataset, prepared.build, Mesh())
        course.check_smallest()
        rates = np.geomspace(first, last, steps)
        scaling = lr_factor(recipe.optimizer, recipe.loop.batch_size)
        assembled = assemble(recipe, prepared.build, steps, factors=scaling * rates / recipe.optimizer.lr)
        stack.callback(assembled.engine.close)
        if course.warms_up(prepared.build.device):
            assembled.engine.warm_up(course.largest(course.start))
        losses, ended = _swept(assembled, course, rates, stepped)
    if not losses:
        raise RecipeError(
            f"no step could be made at the rate {first:g}", ended, "paceline train names the rows to blame"
        )
    return RateRange(
        name=recipe.name,
        optimizer=recipe.optimizer.type,
        rates=tuple(rates[: len(losses)].tolist()),
        losses=tuple(losses),
        ended=ended,
    )


def _swept(
    assembled: Assembled, course: Course, rates: NDArray[np.float64], stepped: Callable[[int], None]
) -> tuple[list[float], str]:
    """The loss of each step that was applied, and why there was no further one."""
    losses, at = list[float](), course.start
    running, lowest = 0.0, math.inf
    # fp16 skips steps until its scale fits: the next one then has their rate
    for step in range(2 * len(rates)):
        loss = float(assembled.engine.accumulate(course.input(at, step)).loss)
        finite = bool(assembled.engine.update().finite)
        at = course.after(at)
        if not math.isfinite(loss) or not (finite or assembled.build.loss_scaling):
            return losses, "loss or gradient was no number"
        if not finite:
            continue
        losses.append(loss)
        stepped(len(losses))
        running = KEPT * running + (1 - KEPT) * loss
        level = running / (1 - KEPT ** len(losses))
        lowest = min(lowest, level)
        if level > DIVERGED * lowest > 0:
            return losses, f"the running loss was {DIVERGED:g} times its lowest"
        if len(losses) == len(rates):
            break
    return losses, "the last rate was reached" if len(losses) == len(rates) else "too many steps were skipped"


def _situation(recipe: Recipe) -> Situation:
    """What is told when the memory is full."""
    loop = recipe.loop
    return Situation(
        recipe=recipe,
        resume="the same command again",
        largest=loop.micro_batch_size or loop.batch_size,
        evaluated=loop.evaluated_together,
    )
