"""What a command is about: a recipe, made of a file and options, or a run folder to go on with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.errors import RecipeError, UserError
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

    A file of data in the recipe's place stands for ``--data``.

    What ``--model`` and ``--data`` say can be set too, as it has to be for a factory or a configuration.

    ``--model`` and ``--data`` replace the file's model and data source, and with them what belongs to the source
    alone: its configuration or factory; its validation and test files. ``--trust-remote-code`` is
    ``model.trust_remote_code``. The recipe in a run folder runs nothing that ``trust`` does not allow.

    Raises:
        UserError: the recipe is a run folder's, and would run code.
        RecipeError: neither a recipe nor both options are given, or the result is no valid recipe.
    """
    if target is not None and target.is_dir():
        raise RecipeError(f"{target}: is a folder", "a recipe is a YAML file", _of_folder(target, verb))
    if target is not None and target.suffix.lower() in _DATA_SUFFIXES:
        if data:
            why = "a recipe is a YAML file; the first of them seems to be data, too"
            raise RecipeError(f"{target} with --data {data}: two sources of data", why, "leave one of them out")
        target, data = None, str(target)
    for option, value, key in (("--model", model, "model.source"), ("--data", data, "data.source")):
        if value and any(change.partition("=")[0].strip() == key for change in settings):
            raise RecipeError(f"{option} {value}: {key} is set twice", "--set names it too", "leave one of them out")
    plain = read_yaml(target) if target else {}
    if model:
        plain["model"] = {**_without(plain.get("model"), "config", "factory", "revision"), "source": model}
    if data:
        plain["data"] = {**_without(plain.get("data"), "validation", "test"), "source": data}
    changed = merge(plain, settings)
    if target is None:
        _require_both(changed, verb, data or "FILE")
    source = changed["data"]["source"] if target is None else ""
    changed.setdefault("name", _run_name(target.stem if target else str(source)))
    recipe = Recipe.parse(changed)
    if target is not None and is_of_a_run(target):
        require_trust(recipe, target, trust, settings)
    elif trust.remote_code:
        recipe = recipe.with_settings(["model.trust_remote_code=true"])
    return recipe


def _require_both(plain: Mapping[str, Any], verb: str, data: str) -> None:
    """A model and data, from options or settings, where no file names them."""
    origins = {"--model": ("source", "config", "factory"), "--data": ("source",)}
    parts = {option: plain.get(option.removeprefix("--")) for option in origins}
    named = [option for option, part in parts.items() if isinstance(part, dict) and any(map(part.get, origins[option]))]
    if missing := [option for option in origins if option not in named]:
        fix = f"paceline {verb} --model distilbert-base-uncased --data {data}, or paceline {verb} RECIPE.yaml"
        raise RecipeError(f"{' and '.join(missing)}: missing", "there is no recipe to take it from", fix)


def _of_folder(folder: Path, verb: str) -> str:
    """What may be meant by a folder in a recipe's place."""
    if (folder / "recipe.yaml").is_file():
        if verb != "train":
            return f"paceline {verb} {folder / 'recipe.yaml'}"
        if not (folder / "summary.json").exists():
            return f"paceline train {folder} --resume goes on with the run"
        return f"paceline train {folder / 'recipe.yaml'} makes the run, which is finished, once more"
    if (folder / "config.json").is_file():
        return f"paceline {verb} --model {folder} --data FILE"
    return f"paceline {verb} RECIPE.yaml; or, where it holds data, paceline {verb} --model NAME --data {folder}"


_DATA_SUFFIXES = frozenset(
    {".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".gz", ".txt"}
    | {".xlsx", ".xlsm", ".xls", ".xlsb", ".ods"}
)


def _without(part: object, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys} if isinstance(part, dict) else {}


def _run_name(source: str) -> str:
    """A name for the run folder from the recipe's or the data's: ``path/reviews.csv.gz`` -> ``reviews``."""
    stem = source.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "run"


def folder_to_resume(target: Path | None, given: Sequence[str]) -> Path:
    """The run folder that ``--resume`` goes on with.

    Args:
        given: options that only a run which starts can have.

    Raises:
        UserError: there is no folder, or one of these options.
    """
    if target is None:
        raise UserError(
            "--resume: no run folder given", "there is nothing to go on with", "paceline train RUN --resume"
        )
    if given:
        why = "a resumed run keeps the recipe and the folder it began with"
        raise UserError(f"--resume with {', '.join(given)}", why, "leave it out, or start a run without --resume")
    return target
