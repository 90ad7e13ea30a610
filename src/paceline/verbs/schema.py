"""``paceline schema``: the recipe's JSON schema on standard output."""

from __future__ import annotations

import sys
from typing import Any

from paceline.recipe.schema import recipe_schema, schema_text


def schema() -> dict[str, Any]:
    """Print the recipe's JSON schema and return it as plain data."""
    sys.stdout.write(schema_text())
    return recipe_schema()
