"""What can be done with a run that is there, for messages."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from paceline.recipe.trust import switches


def named_now(name: str) -> Path:
    """A run folder's name where nobody gives one: ``runs/<name>-<YYYYmmdd-HHMMSS>``."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def has_checkpoint(path: Path) -> bool:
    """Whether a run that is there can be resumed."""
    return any((path / "checkpoints").glob("*/COMMITTED"))  # written last, see checkpoint/store.py


def way_to_more(recipe: Recipe, *, stopped_early: bool) -> str:
    """What makes a run train on that has ended: where its steps are limited too, more epochs alone do not."""
    if stopped_early:
        return "--set loop.early_stopping=null trains on"
    unlimited = "" if recipe.loop.max_steps is None else " --set loop.max_steps=null"
    return f"--set loop.epochs={recipe.loop.epochs + 1}{unlimited} trains on"


def way_on(path: Path) -> str:
    """Return the command that continues a run, or uses its model; without a checkpoint there is nothing to resume."""
    if has_checkpoint(path):
        return f"go on with it: paceline train {path} --resume{_switches(path)}{_more(path)}"
    if (path / "model").exists():  # fitted, without a step
        return f"use its model: paceline evaluate {path}{_switches(path)}"
    return f"no step of it is saved: remove {path}"


def _more(path: Path) -> str:
    """Return the settings with which a run that has ended trains on; empty while it has not."""
    try:
        status = json.loads((path / "summary.json").read_text(encoding="utf-8"))["status"]
        way = way_to_more(Recipe.load(path / "recipe.yaml"), stopped_early=status == "stopped early")
        return f" {way.removesuffix(' trains on')}"
    except (OSError, ValueError, KeyError, TypeError, RecipeError):
        return ""  # the error of whatever reads them says so


def _switches(path: Path) -> str:
    """What a command about the run has to allow, for what its recipe names to be run."""
    try:
        return switches(Recipe.load(path / "recipe.yaml"))
    except RecipeError:  # who reads it is told
        return ""
