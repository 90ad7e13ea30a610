"""``paceline techniques``: the catalogue, for reading."""

from __future__ import annotations

import sys
import types
from typing import Any, Literal, get_args, get_origin

from paceline.recipe.parts import TechniquesPart
from paceline.recipe.techniques import CATALOGUE, TechniqueEntry


def techniques() -> tuple[TechniqueEntry, ...]:
    """Print every technique with its settings, what it needs, excludes and preserves; return the catalogue."""
    sys.stdout.write("\n\n".join(_shown(entry) for entry in CATALOGUE) + "\n")
    return CATALOGUE


def _shown(entry: TechniqueEntry) -> str:
    field = TechniquesPart.model_fields[entry.name]
    needs = list(entry.needs) + list(entry.packages)
    if entry.capability:
        needs.append("a card of compute capability {}.{}".format(*entry.capability))
    lines = [
        f"{entry.name}: {entry.summary}",
        f"  setting    {entry.setting} = {_choices(field.annotation)}  (default {_word(field.default)})",
        f"  preserves  {entry.preserves}",
        f"  needs      {', '.join(needs)}" if needs else "",
        f"  excludes   {', '.join(entry.excludes)}" if entry.excludes else "",
        f"  card       {entry.card}",
    ]
    return "\n".join(line for line in lines if line)


def _choices(annotation: Any) -> str:
    """The values a field takes, as YAML writes them."""
    if annotation is bool:
        return "true | false"
    if get_origin(annotation) is Literal:
        return " | ".join(_word(value) for value in get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return " | ".join(_choices(member) for member in get_args(annotation))
    return "null" if annotation is types.NoneType else str(getattr(annotation, "__name__", annotation))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
