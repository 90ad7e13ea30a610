"""What a command is about: a recipe, made of a file and options, or a run folder to go on with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError, UserError
from paceline.recipe import Recipe, merge, read_yaml
from paceline.recipe.trust import NONE, Trust, is_of_a_run, require_trust


def build_recipe(
    target: Path | None,
    model: str | None,
    data: str | None,
    settings: Sequence[str],
    verb: str = "train",
    trust: Trust = NONE,
) -> Recipe:
    """The recipe that a command is about: the file's, then ``--model`` and ``--data``, then ``--set``.

    ``--model`` and ``--data`` replace the file's model and data source, and with them what belongs to the source
    alone: its configuration or factory; its validation and test files. ``--trust-remote-code`` is
    ``model.trust_remote_code``. The recipe in a run folder runs nothing that ``trust`` does not allow.

    Raises:
        UserError: the recipe is a run folder's, and would run code.
        RecipeError: neither a recipe nor both options are given, or the result is no valid recipe.
    """
    if target is None and not (model and data):
        missing = " and ".join(name for name, value in (("--model", model), ("--data", data)) if not value)
        fix = f"paceline {verb} --model distilbert-base-uncased --data FILE, or paceline {verb} RECIPE.yaml"
        raise RecipeError(f"{missing}: missing", "there is no recipe to take it from", fix)
    if target is not None and target.is_dir():
        fix = f"paceline train {target} --resume, or name a recipe file"
        if verb != "train":
            fix = f"paceline {verb} {target / 'recipe.yaml'}, where it is a run folder"
        raise RecipeError(f"{target}: is a folder", "a recipe is a YAML file", fix)
    if target is not None and target.suffix in _DATA_SUFFIXES:
        fix = f"paceline {verb} --model {model or 'NAME'} --data {target}"
        raise RecipeError(f"{target}: is no recipe", "a recipe is a YAML file; this seems to be data", fix)
    plain = read_yaml(target) if target else {}
    if model:
        plain["model"] = {**_without(plain.get("model"), "config", "factory", "revision"), "source": model}
    if data:
        plain["data"] = {**_without(plain.get("data"), "validation", "test"), "source": data}
    plain.setdefault("name", _run_name(target.stem if target else str(data)))
    recipe = Recipe.parse(merge(plain, settings))
    if target is not None and is_of_a_run(target):
        require_trust(recipe, target, trust, settings)
    elif trust.remote_code:
        recipe = recipe.with_settings(["model.trust_remote_code=true"])
    return recipe


_DATA_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".txt"})


def _without(part: object, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys} if isinstance(part, dict) else {}


def _run_name(source: str) -> str:
    """A name for the run folder from the recipe's or the data's: ``path/reviews.csv.gz`` -> ``reviews``."""
    stem = source.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "run"


def folder_to_resume(target: Path | None, options: dict[str, object]) -> Path:
    if target is None:
        raise UserError(
            "--resume: no run folder given", "there is nothing to go on with", "paceline train RUN --resume"
        )
    given = [name for name, value in options.items() if value is not None]
    if given:
        why = "a resumed run keeps the recipe and the folder it began with"
        raise UserError(f"--resume with {', '.join(given)}", why, "leave it out, or start a run without --resume")
    return target
