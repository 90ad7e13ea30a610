"""``paceline lr``: the learning-rate range test, before a run and without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline._version import __version__
from paceline.contract.errors import RecipeError
from paceline.contract.exclusive import exclusive
from paceline.machine.facts import this_machine
from paceline.observe.formats import figure, printable
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.techniques import shards
from paceline.verbs.notices import tell

if TYPE_CHECKING:
    from paceline.run.rate_range import RateRange

FIRST: Final = 1e-7
LAST: Final = 1.0
STEPS: Final = 100
FEWEST: Final = 20
"""Steps without which a loss says nothing of a rate."""

WIDTH, HEIGHT = 72, 16
"""Characters of the drawing in the console."""


@exclusive("paceline lr", trains=True)
def lr(
    recipe: Recipe,
    *,
    first: float = FIRST,
    last: float = LAST,
    steps: int = STEPS,
    out: str | Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> RateRange:
    """Find a learning rate for a recipe: a few steps whose rate grows exponentially, on weights that are then dropped.

    No run is made, and nothing is written but what ``out`` asks for. The recipe's schedule is left out:
    what is found is ``optimizer.lr`` at its largest, for this batch. ``lr_scaling`` multiplies it as in a run, and a
    group's own rate grows by as much.

    Args:
        recipe: the run; one process carries it out, also where several would train it.
        first, last: rates of the first and the last step.
        steps: at most; fewer where the loss diverges.
        out: a folder for lr.json and report.html.
        progress: told of each step, from 1.

    Raises:
        RecipeError: rates or steps that are none; what ``train`` would say of the recipe.
        UserError: what ``train`` would say of the data; a folder that cannot be written to.
    """
    _refuse(recipe, first, last, steps)
    facts = this_machine()
    chosen, decisions = choose(recipe, facts)
    from paceline.run.rate_range import measure_rates

    found = measure_rates(chosen, decisions, facts, first=first, last=last, steps=steps, tell=tell, stepped=progress)
    if out is not None:
        write(found, Path(out))
    return found


def _refuse(recipe: Recipe, first: float, last: float, steps: int) -> None:
    """What no range test can be made of."""
    if not (math.isfinite(last) and 0 < first < last):
        why = "the first rate is above 0, and the last one above it"
        raise RecipeError(f"--from {first:g} --to {last:g}", why, f"--from {FIRST:g} --to {LAST:g}")
    if steps < FEWEST:
        raise RecipeError(f"--steps {steps}", "so few losses say nothing of a rate", f"--steps {STEPS}")
    if recipe.model.train == "features":
        raise RecipeError("model.train = features", "no step is made, so no rate is used", "--set model.train=all")
    if shards(recipe.parallel.strategy):
        why = "it shards the model over processes, and the test is made by one"
        raise RecipeError(f"parallel.strategy = {recipe.parallel.strategy}", why, "--set parallel.strategy=auto")
    if recipe.data.source == "memory":
        raise RecipeError("data.source: missing", "there are no rows to take steps on", "--data FILE")


def plain(found: RateRange) -> dict[str, Any]:
    """What ``--json`` prints, and lr.json holds."""
    return {
        "name": found.name,
        "optimizer": found.optimizer,
        "suggestion": found.suggestion,
        "rule": found.rule or None,
        "steepest": found.steepest,
        "tenth_of_lowest": found.tenth_of_lowest,
        "ended": found.ended,
        "rates": list(found.rates),
        "losses": list(found.losses),
        "smoothed": list(found.smoothed),
    }


def write(found: RateRange, folder: Path) -> None:
    """lr.json and report.html; those of an earlier test are replaced.

    Raises:
        DiskFullError: no room.
        UserError: the folder cannot be written to.
    """
    from paceline.report.charts import Axis, Series, line_chart
    from paceline.report.page import page_of, write_found

    def points(losses: Sequence[float]) -> list[tuple[float, float]]:
        shown = [loss if loss <= _ceiling(found) else math.nan for loss in losses]
        return list(zip(map(math.log10, found.rates), shown, strict=True))

    chart = line_chart(
        "Loss",
        [
            Series(name="loss, each step", points=points(found.losses), look="faint"),
            Series(name="loss", points=points(found.smoothed)),
        ],
        axis=Axis(name="learning rate", write=lambda value: f"{10**value:.2g}"),
        marks=[] if found.suggestion is None else [math.log10(found.suggestion)],
    )
    content = {
        "name": found.name,
        "found": found,
        "chart": chart,
        "suggestion": suggestion(found),
        "first": f"{found.rates[0]:.2g}",
        "last": f"{found.rates[-1]:.2g}",
        "version": __version__,
    }
    write_found(folder, "lr.json", plain(found), page_of("rates.html", content))


def suggestion(found: RateRange) -> str:
    """The rate to begin with, and by which rule; or that there is none."""
    if found.suggestion is None:
        return "No rate is suggested: the loss hardly fell at any. More steps, a larger batch or other data may tell."
    others = {"steepest descent": found.steepest, "a tenth of the rate with the lowest loss": found.tenth_of_lowest}
    other = next(f"{rule}: {rate:.1e}" for rule, rate in others.items() if rule != found.rule)
    return f"Suggested: --lr {found.suggestion:.1e} ({found.rule}; {other})."


def shown(found: RateRange) -> str:
    """The curve drawn in characters, and what it suggests."""
    lines = [f"{printable(found.name)}: loss over the learning rate, {found.optimizer}", ""]
    lines += [*_drawn(found), "", f"{len(found.losses)} steps; {found.ended}.", suggestion(found)]
    return "\n".join(lines) + "\n"


def _ceiling(found: RateRange) -> float:
    """The highest loss that is drawn: where it diverges, nothing would be seen of how it fell before."""
    begun, low, high = found.smoothed[0], min(found.smoothed), max(found.smoothed)
    return min(high, begun + (begun - low)) if found.suggestion is not None else high


def _drawn(found: RateRange) -> Iterator[str]:
    low, high = min(found.smoothed), _ceiling(found)
    start, end = (math.log10(rate) for rate in (found.rates[0], found.rates[-1]))

    def column(rate: float) -> int:
        return round((math.log10(rate) - start) / ((end - start) or 1.0) * (WIDTH - 1))

    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    if found.suggestion is not None:
        for row in rows:
            row[column(found.suggestion)] = ":"
    for rate, loss in zip(found.rates, found.smoothed, strict=True):
        if loss > high:
            continue
        rows[round((high - loss) / ((high - low) or 1.0) * (HEIGHT - 1))][column(rate)] = "*"
    labels = {0: figure(high), HEIGHT - 1: figure(low)}
    for index, row in enumerate(rows):
        yield f"{labels.get(index, ''):>10} |{''.join(row)}".rstrip()
    yield f"{'':>10} +{'-' * WIDTH}"
    scale = [" "] * (WIDTH + 8)
    for exponent in range(math.ceil(start), math.floor(end) + 1):
        for offset, letter in enumerate(f"1e{exponent}"):
            scale[column(10.0**exponent) + offset] = letter
    yield f"{'':>10}  {''.join(scale)}".rstrip()
