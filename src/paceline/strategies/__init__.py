"""Ways in which the ranks or devices of a run share its model and its work: one room each.

Each room has a ``STRATEGY``, which a run is made of when the catalogue's entry of that name is on.
"""

from __future__ import annotations

import importlib

from paceline.recipe import Recipe
from paceline.recipe.techniques import entry_of
from paceline.seams import Mesh
from paceline.strategies.alone import OneDevice
from paceline.strategies.strategy import Strategy


def strategy_for(recipe: Recipe, mesh: Mesh) -> Strategy:
    """How the recipe's run shares its work. A room is loaded when a run enters it.

    Args:
        recipe: checked against this machine.
        mesh: the ranks of the run.
    """
    if mesh.pipe.size > 1:
        return _room("pipeline")(mesh, recipe)
    if mesh.tensor.size > 1:
        return _room("tensor")(mesh, recipe)
    # auto is still open where no step is made, or where there is one rank
    name = "ddp" if recipe.parallel.strategy == "auto" else recipe.parallel.strategy
    if name == "ddp" and mesh.data.size == 1:  # nothing to share
        return OneDevice(mesh, recipe)
    return _room(name)(mesh, recipe)


def _room(name: str) -> type[Strategy]:
    strategy: type[Strategy] = importlib.import_module(entry_of(name).module).STRATEGY
    return strategy
