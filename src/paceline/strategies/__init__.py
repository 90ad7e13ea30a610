"""Ways in which the ranks or devices of a run share its model and its work: one room each."""

from __future__ import annotations

import importlib

from paceline.recipe import Recipe
from paceline.seams import Mesh
from paceline.strategies.strategy import Strategy

ROOMS = {
    "alone": "paceline.strategies.alone:OneDevice",
    "ddp": "paceline.strategies.ddp.strategy:DataParallel",
    "fsdp": "paceline.strategies.fsdp.strategy:Sharded",
    "dp": "paceline.strategies.dp:OneProcess",
}
"""Strategies by the name that ``parallel.strategy`` has for them. A room is loaded when a run enters it."""


def strategy_for(recipe: Recipe, mesh: Mesh) -> Strategy:
    """How the recipe's run shares its work.

    Args:
        recipe: checked against this machine; where one rank leaves nothing to share, its strategy may still be auto.
        mesh: the ranks of the run.
    """
    name = recipe.parallel.strategy.replace("auto", "ddp")
    module, _, found = ROOMS["alone" if name == "ddp" and mesh.data.size == 1 else name].partition(":")
    strategy: type[Strategy] = getattr(importlib.import_module(module), found)
    return strategy(mesh, recipe)
