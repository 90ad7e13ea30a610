"""Paths of a recipe as they are from every folder: what a run keeps has to be found again from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.recipe.parts import DataPart
from paceline.recipe.recipe import Recipe

_NO_PATHS = ("hub:", "builtin:")


def absolute_data(part: DataPart) -> DataPart:
    """A data part whose files are named by absolute paths; links are kept as they are."""
    named = {"source": part.source, "validation": part.validation, "test": part.test}
    changed = {
        field: _absolute(name)
        for field, name in named.items()
        if name and name != "memory" and not name.startswith(_NO_PATHS)
    }
    return part.model_copy(update={field: name for field, name in changed.items() if name != named[field]})


def absolute(recipe: Recipe) -> Recipe:
    """A recipe whose data and mirror, and model and tokenizer where they are folders, are named by absolute paths."""
    model, data = recipe.model, absolute_data(recipe.data)
    folders = {
        field: _absolute(name)
        for field, name in (("source", model.source), ("tokenizer", model.tokenizer))
        if name and name != "auto" and Path(name).expanduser().is_dir()
    }
    changed = {field: name for field, name in folders.items() if name != getattr(model, field)}
    loop = recipe.loop
    if loop.checkpoint_mirror and "://" not in loop.checkpoint_mirror:
        loop = loop.model_copy(update={"checkpoint_mirror": _absolute(loop.checkpoint_mirror)})
    if not changed and data == recipe.data and loop == recipe.loop:
        return recipe
    return recipe.model_copy(update={"data": data, "loop": loop, "model": model.model_copy(update=changed)})


def _absolute(name: str) -> str:
    return os.path.abspath(Path(name).expanduser())
