"""``package.module:function`` in a recipe: the user's own code, named by the user."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import RecipeError, nearest


def resolve(reference: str, setting: str) -> Callable[..., Any]:
    """The function that ``reference`` names; modules in the current folder are found too.

    Args:
        reference: ``package.module:function``.
        setting: dotted path of the recipe field, for the message.

    Raises:
        RecipeError: there is no such module or function, or it is not callable.
    """
    module_name, _, name = reference.partition(":")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise RecipeError(
            f"{setting} = {reference}",
            f"there is no module {error.name!r} in the current folder or the environment",
            "run from the folder that holds it, or install its package",
        ) from None
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"{setting} = {reference}", f"{module_name} has no function {name!r}", nearest(name, names))
    return found  # type: ignore[no-any-return]
