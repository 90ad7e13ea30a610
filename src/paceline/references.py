"""``package.module:function`` in a recipe: the user's own code, named by the user."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from paceline.errors import RecipeError, nearest


def resolve(reference: str, setting: str) -> Callable[..., Any]:
    """The function that ``reference`` names; modules in the current folder are found too.

    Args:
        reference: ``package.module:function``.
        setting: dotted path of the recipe field, for the message.

    Raises:
        RecipeError: there is no such module or function, or importing it failed.
    """
    module_name, _, name = reference.partition(":")
    what = f"{setting} = {reference}"
    try:
        with current_folder_importable():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise RecipeError(
                f"{what}: there is no module {missing}",
                "looked in the current folder and in the environment",
                "run where the file is, or install the package it is in",
            ) from None
        raise RecipeError(
            f"{what}: cannot be imported", f"it needs the module {missing}", f"install {missing}"
        ) from error
    except Exception as error:
        raise RecipeError(f"{what}: cannot be imported", described(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        why = "it is not a function" if function is not None else nearest(name, known)
        raise RecipeError(f"{what}: {module_name} has no function {name}", why)
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def current_folder_importable() -> Iterator[None]:
    """While inside, modules in the current folder can be imported, as in ``python -m``."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def described(error: BaseException) -> str:
    """An error of the user's code and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no frame"
    return f"{type(error).__name__}: {error} ({place})"
