"""``paceline bench loader``: how fast a recipe's batches can arrive, so that a slow step is not blamed on the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.contract.errors import UserError, excerpt
from paceline.machine.facts import this_machine
from paceline.observe.formats import columns, printable
from paceline.recipe import Recipe

if TYPE_CHECKING:
    from paceline.bench.arrivals import Arrival


def bench_loader(recipe: Recipe, *, workers: Sequence[int] | None = None, seconds: float = 2.0) -> tuple[Arrival, ...]:
    """Bring a recipe's batches to its device in every way that this machine has, each for a few seconds.

    Args:
        recipe: data, batch and device; its model is built, and not run.
        workers: numbers of DataLoader's processes; None: 0, 1, 2, 4 and 8 up to the processors.
        seconds: for each way.

    Raises:
        UserError: what ``train`` would say of data and model.
    """
    facts = this_machine()
    from paceline.bench.arrivals import arrivals

    return arrivals(recipe, facts, seconds=seconds, workers=workers)


def parse_counts(text: str | None) -> tuple[int, ...] | None:
    """``0,2,4`` as numbers.

    Raises:
        UserError: one is none.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 256 for part in parts):
        raise UserError(f"--workers {excerpt(text)}", "these are numbers of processes", "--workers 0,2,4")
    return tuple(int(part) for part in parts)


def shown(recipe: Recipe, found: Sequence[Arrival]) -> str:
    """A line a way; the fastest stands first."""
    size = recipe.loop.micro_batch_size or recipe.loop.batch_size
    ordered = sorted(found, key=lambda each: -each.samples_per_second)
    rows = [("", "workers", "pinned", "samples/s", "lowest..highest")]
    for each in ordered:
        spread = f"{each.lowest:,.0f}..{each.highest:,.0f}"
        is_loader = each.way.startswith("DataLoader")
        workers, pinned = (str(each.workers), "yes" if each.pinned else "no") if is_loader else ("", "")
        rows.append((each.way, workers, pinned, f"{each.samples_per_second:,.0f}", spread))
    title = f"{printable(recipe.name)}: batches of {size} brought to the device, without a model"
    lines = [title, "", *columns(rows), "", "A step waits for data only where the model is faster than this."]
    return "\n".join(lines) + "\n"


def printed(recipe: Recipe, found: Sequence[Arrival]) -> str:
    """The same as JSON."""
    return json.dumps({"name": recipe.name, "ways": [asdict(each) for each in found]}, indent=2)
