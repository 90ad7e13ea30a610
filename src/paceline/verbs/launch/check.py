"""Whether a recipe can run as the ranks that are to be started; asked before any of them is, and without torch."""

from __future__ import annotations

from paceline.errors import RecipeError
from paceline.facts import Facts
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.verbs.launch.ranks import Ranks


def check_recipe(recipe: Recipe, ranks: Ranks, machine: Facts, command: str) -> None:
    """Refuse what every rank would refuse, once and with the corrected command.

    Args:
        command: that starts the ranks; a setting that is added to it takes the place of one before.

    Raises:
        RecipeError: a setting that cannot work on this machine, beside another, or on so many ranks.
    """
    try:
        if ranks.count > 1 and recipe.parallel.backend == "mpi":
            why = "MPI numbers the processes that mpirun starts, and these are started by paceline"
            raise RecipeError("parallel.backend = mpi", why, "--set parallel.backend=auto")
        choose(recipe, ranks.see(machine), ranks.count)
    except RecipeError as error:
        fix = f"{command} {error.fix}" if error.fix.startswith("--set ") else error.fix
        raise RecipeError(error.what, error.why, fix) from None
