"""The JSON schema is the recipe's: what it names exists, and it says what each field is for."""

from __future__ import annotations

import json
from typing import Any

from paceline.recipe import Recipe
from paceline.verbs.schema import recipe_schema, schema_text


def test_the_schema_is_json_of_the_recipes_fields() -> None:
    schema = json.loads(schema_text())
    assert schema == recipe_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert "model" in schema["required"]


def test_unknown_keys_are_refused_at_every_level() -> None:
    schema = recipe_schema()
    parts = {"Recipe": schema, **schema["$defs"]}
    open_parts = [name for name, part in parts.items() if part.get("additionalProperties") is not False]
    assert not open_parts, f"editors would accept misspelt keys in {open_parts}"


def test_editors_can_complete_values_and_show_what_they_do() -> None:
    parts: dict[str, Any] = recipe_schema()["$defs"]
    precision = parts["TechniquesPart"]["properties"]["precision"]
    assert "bf16" in precision["enum"]
    assert precision["description"]
    assert parts["TechniquesPart"]["properties"]["recompute"]["default"] is False


def test_techniques_may_be_auto_as_a_whole() -> None:
    assert {"const": "auto", "type": "string"} in recipe_schema()["properties"]["techniques"]["anyOf"]
