"""Recipes: frozen, torch-free descriptions of whole runs."""

from paceline.recipe.recipe import Recipe, flatten, is_execution, merge, parse_yaml, read_yaml

__all__ = ["Recipe", "flatten", "is_execution", "merge", "parse_yaml", "read_yaml"]
