"""Ranks for ``paceline.train(..., gpus=2)``: the launcher starts them, as ``paceline train --gpus 2`` does."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from paceline.contract.errors import Preempted, RecipeError, RunFolderError, UserError
from paceline.contract.files import write_atomically
from paceline.contract.interpreter import python
from paceline.machine.facts import this_machine
from paceline.observe.collect import read_summary
from paceline.recipe import Recipe
from paceline.run_folder import named_now
from paceline.verbs.launch.check import check_recipe
from paceline.verbs.launch.launcher import launch
from paceline.verbs.launch.ranks import choose_ranks, parse_gpus

if TYPE_CHECKING:
    from paceline.contract.records import RunRecord


def train_on_ranks(
    recipe: Recipe,
    data: object | None,
    *,
    gpus: object | None,
    processes: int | None,
    out: str | Path | None,
    timeout_seconds: float,
) -> RunRecord:
    """Train a recipe as several ranks of this machine, each a process of its own; returns what became of the run.

    The ranks read the recipe from a file. So nothing of this process reaches them but its environment and its current
    folder, and a script needs no ``if __name__ == "__main__"`` around the call.

    Raises:
        RecipeError: rows in memory, which are of this process alone; a recipe that cannot run on these ranks.
        UserError: the ranks cannot be started so, or have failed; why stands on standard error.
        Preempted: asked to stop; a checkpoint is saved.
    """
    asked = f"gpus={gpus!r}" if gpus is not None else f"processes={processes!r}"
    if data is not None or recipe.data.source == "memory":
        why = "each rank reads the data itself, and rows in memory are of this process"
        fix = f'write them to a file, and name it: train(recipe, "rows.csv", {asked})'
        raise RecipeError(f"train(recipe, rows, {asked})", why, fix)
    facts, count = functools.cache(this_machine), None if gpus is None else parse_gpus(gpus)
    ranks = choose_ranks(
        "paceline train RECIPE", facts, os.environ, gpus=count, processes=processes, device=recipe.device
    )
    options = ["--gpus", str(count)] if processes is None else ["--processes", str(processes)]
    check_recipe(recipe, ranks, facts(), ["train", "RECIPE", *options])
    folder = Path(out) if out is not None else named_now(recipe.name)
    with tempfile.TemporaryDirectory(prefix="paceline-") as place:
        file = Path(place) / f"{recipe.name}.yaml"
        # what was set alone: a default that is written out would be taken for a wish
        write_atomically(file, yaml.safe_dump(recipe.plain(), allow_unicode=True).encode("utf-8"))
        words = ["train", str(file), "--out", str(folder), "--timeout", str(max(1, round(timeout_seconds)))]
        code = launch(python("-m", "paceline", *words), ranks, makes_run=True)
    if code == Preempted.exit_code:
        raise Preempted(f"{folder}: stopped as asked; paceline.resume({str(folder)!r}) goes on")
    if code:
        raise UserError(f"train(recipe, {asked}): the ranks ended with exit code {code}", "standard error says why")
    record = read_summary(folder / "summary.json")
    if record is None:
        raise RunFolderError(f"{folder / 'summary.json'}: missing", "the ranks ended without an error", "run again")
    return record
