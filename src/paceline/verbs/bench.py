"""``paceline bench RECIPE``: the same work under every technique and every peer, in fresh processes, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.bench.folder import CELLS, NEEDS
from paceline.bench.ladder import Climb, Ladder, Outlook, Wanted
from paceline.bench.records import Records
from paceline.bench.rungs import EVERY, LADDERS, chosen, obstacle
from paceline.contract.files import disk_errors, write_atomically
from paceline.contract.plain import plain as spelled_out
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe

FOLDER = "runs/bench-{name}"
"""Where a bench goes by default: a place that the same command finds again."""


def bench(
    recipe: Recipe,
    wanted: Wanted = Wanted(),  # noqa: B008 - it is frozen
    *,
    out: str | Path | None = None,
    figures: str | Path | None = None,
    tell: Callable[[Outlook], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Ladder:
    """Measure a recipe's work on every rung of the ladder that this machine can climb.

    Each cell is a process of its own; rungs take turns. What is measured is on the disk at once, and the same call goes
    on with what is missing. ``report.html`` and ``table.txt`` are written at the end, also of a bench that is
    interrupted.

    Args:
        recipe: the work: its rows, its model, its batch, its optimizer.
        wanted: rungs, repeats, time.
        out: folder; None: ``runs/bench-NAME``.
        figures: a folder for the charts as SVG, PNG and PDF.
        tell: is given the outlook before every cell, and at the end.
        say: is given lines for people.

    Raises:
        DiskFullError: no room; what was measured is kept.
        UserError: a rung that is none, a folder that is in use or holds something else, no time for one cell.
    """
    folder = Path(out) if out is not None else Path(FOLDER.format(name=recipe.name))
    climb = Climb(recipe, wanted, folder, tell=tell, say=say)
    try:
        return climb.run()
    finally:
        if climb.found is not None:
            write(climb.found, None if figures is None else Path(figures), say)


def write(found: Ladder, figures: Path | None, say: Callable[[str], None] = lambda _: None) -> None:
    """report.html and table.txt, and the figures.

    Raises:
        DiskFullError: no room.
        RunFolderError: a place that cannot be written to.
    """
    from paceline.bench.figures import write_figures
    from paceline.bench.page import page
    from paceline.bench.table import shown

    write_atomically(found.folder / "report.html", page(found).encode("utf-8", "backslashreplace"))
    write_atomically(found.folder / "table.txt", shown(found).encode("utf-8", "backslashreplace"))
    if figures is not None:
        with disk_errors(figures / "figures"):
            write_figures(found, figures, say)


def listed(names: tuple[str, ...] = (), facts: Callable[[], Facts] = this_machine) -> str:
    """The ladder's rungs, what each changes, and what this machine lacks for it.

    Raises:
        UserError: a name that no rung has.
    """
    wanted, here = set(chosen(EVERY, names)), facts()
    width = max(len(rung.name) for rung in EVERY)
    lines = []
    for reads, ladder in LADDERS.items():
        rungs = [rung for rung in ladder if rung in wanted]
        if rungs:
            lines.append(f"models of {reads}s")
        for rung in rungs:
            problem = obstacle(rung, here)
            lines.append(f"  {rung.name:<{width}}  {rung.change}")
            if problem:
                lines.append(f"  {'':<{width}}  {problem[0]}: {problem[1]}")
    return "\n".join(lines) + "\n"


def plain(found: Ladder) -> dict[str, Any]:
    """What ``--json`` prints: the work, the machine, every cell, and what the cells come to."""
    rows = [
        {
            "rung": row.rung.name,
            "change": row.rung.change,
            "state": row.state,
            "why": row.why or row.told,
            "verdict": row.verdict,
            "n": row.n,
            "samples_per_second": row.rate.median if row.rate else None,
            "whole_seconds": row.whole.median if row.whole else None,
            "quality": row.quality.median if row.quality else None,
            "fastest": row.is_best,
        }
        for row in found.rows
    ]
    return {
        "name": found.name,
        "about": found.about,
        "rows": rows,
        "cells": list(Records(found.folder / CELLS, needs=NEEDS)),
    }


def printed(found: Ladder) -> str:
    """``plain`` as JSON."""
    return json.dumps(spelled_out(plain(found)), indent=2, ensure_ascii=False, allow_nan=False)


def told(found: Ladder) -> str:
    """The table, and where the rest is."""
    from paceline.bench.table import shown

    return f"{shown(found)}wrote {found.folder / 'report.html'}\n"
