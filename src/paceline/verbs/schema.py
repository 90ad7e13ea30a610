"""``paceline schema``: the recipe's JSON schema, with which editors complete and check recipe files."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.recipe.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a recipe file.

    A recipe names it in its first line: ``# yaml-language-server: $schema=recipe.schema.json``.
    """
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "paceline recipe"}


def schema_text() -> str:
    """The schema as indented JSON, one trailing newline."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """Print the recipe's JSON schema and return it as plain data."""
    sys.stdout.write(schema_text())
    return recipe_schema()
