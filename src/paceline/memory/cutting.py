"""Whether ranks can share a recipe's model as it says, found before there are ranks, weights and data.

A run's own strategy cuts the model, in the one place where a model has no memory: on the stand-in for a GPU. So what is
refused here is what every rank would refuse, in the same words.
"""

from __future__ import annotations

from torch import nn

from paceline.contract.errors import RecipeError, UserError
from paceline.machine.facts import Gpu
from paceline.memory.stand_in import UNTRACEABLE, stand_in
from paceline.memory.subject import Subject, subject_of
from paceline.memory.trace import model_of, placed
from paceline.memory.world import planned_world
from paceline.prepare.preparation import build_for
from paceline.recipe import Recipe
from paceline.recipe.catalogue.strategies import AXES
from paceline.recipe.techniques import CATALOGUE
from paceline.seams import Mesh

_ANY_GPU = Gpu(name="any")
"""How a model is cut does not depend on what it runs on."""


def require_cut(recipe: Recipe, world_size: int) -> None:
    """Refuse a model that so many ranks cannot share as ``parallel.tensor`` and ``parallel.pipeline`` say.

    In a process that does nothing else, see ``stand_in``. What cannot be found out here (a model that is not on this
    machine, a forward pass that asks for numbers) is left to the ranks, and so is every other error.

    Args:
        recipe: whether ``choose`` has seen it or not.

    Raises:
        RecipeError: no blocks, too few, of another kind; heads that do not divide; a weight of two stages.
    """
    try:
        subject = subject_of(recipe)
        _cut(subject, model_of(subject), world_size)
    except (UserError, *UNTRACEABLE) as error:
        if isinstance(error, RecipeError) and error.what.startswith(tuple(entry.setting for entry in AXES)):
            raise


def _cut(subject: Subject, model: nn.Module, world_size: int) -> None:
    part = subject.recipe.parallel
    mesh = Mesh.over(planned_world(world_size), tensor=part.tensor, pipe=part.pipeline)
    # cut first of all, and no technique makes a model that can be cut of one that cannot
    switches = [entry.setting for entry in CATALOGUE if entry.setting.startswith("techniques.") and entry.off is False]
    changes = ["techniques.precision=fp32", *(f"{switch}=false" for switch in switches)]
    with stand_in(_ANY_GPU) as (device, _):
        recipe = subject.recipe.with_settings(changes)
        build_for(recipe, placed(model, device), subject.dataset, device, mesh=mesh)
