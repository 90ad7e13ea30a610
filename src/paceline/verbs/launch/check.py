"""Whether a recipe can run as the ranks that are to be started; asked before any of them is, and without torch."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence

from paceline.contract.errors import RecipeError
from paceline.machine.disk import require_disk
from paceline.machine.facts import Facts
from paceline.memory.predict import PlanFailed, Predictor
from paceline.recipe import Recipe
from paceline.recipe.catalogue.strategies import AXES
from paceline.recipe.choose import choose
from paceline.verbs.launch.ranks import Ranks
from paceline.verbs.short import without


def require_cut(recipe: Recipe, world_size: int) -> None:
    """Refuse a model that ranks cannot share as the recipe says; nothing is asked where each keeps a whole one.

    Args:
        recipe: for a machine that may be another than this one.

    Raises:
        RecipeError: it has no blocks that can be cut, or too few, or what they have does not divide.
    """
    if not any(entry.is_on(recipe) for entry in AXES):
        return
    # what goes wrong here otherwise is no reason not to start
    with contextlib.suppress(PlanFailed), Predictor() as beside:
        beside.require_cut(recipe, world_size)


def check_recipe(recipe: Recipe, ranks: Ranks, machine: Facts, arguments: Sequence[str]) -> None:
    """Refuse what every rank would refuse, once and with the corrected command.

    Args:
        arguments: of the command that starts the ranks; what is advised takes the place of what they set.

    Raises:
        RecipeError: a setting that cannot work on this machine, beside another, or on so many ranks.
    """
    try:
        if ranks.total > 1 and recipe.parallel.backend == "mpi":
            why = "MPI numbers the processes that mpirun starts, and these are started by paceline"
            raise RecipeError("parallel.backend = mpi", why, "--set parallel.backend=auto")
        chosen, _ = choose(recipe, ranks.see(machine), ranks.total)
        if chosen.parallel.offload_folder is not None:
            require_disk(chosen.parallel.offload_folder, on_gpu=chosen.device == "cuda")
        require_cut(chosen, ranks.total)
    except RecipeError as error:
        fix = error.fix
        if fix.startswith("--set "):
            kept = without(arguments, fix.split()[1])
            fix = f"{shlex.join(['paceline', *kept])} {fix}"
        raise RecipeError(error.what, error.why, fix) from None
