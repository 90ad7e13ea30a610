"""``package.module:function`` in a recipe: the user's own code, named by the user."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.contract.errors import PacelineError, RecipeError, nearest


def resolve(reference: str, setting: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that ``reference`` names; modules in the current folder are found too.

    Args:
        reference: ``package.module:function``.
        setting: dotted path of the recipe field, for the message.
        arguments: names of what it will be called with, by position; none: its form is not looked at.

    Raises:
        RecipeError: there is no such module or function, importing it failed, or it takes other arguments.
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
    if arguments and not _takes(function, len(arguments)):
        form = f"{name}({', '.join(arguments)})"
        raise RecipeError(f"{what}: takes other arguments", f"it is called as {form}", f"define it as: def {form}: ...")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Inside, a function of the user's runs: what it raises is shown as its error, not as a bug of ours.

    ``what`` names the setting and its value. Our own errors, and a GPU without memory, pass through.
    """
    try:
        yield
    except (PacelineError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which this floor does not import
            raise
        raise RecipeError(f"{what}: failed", described(error), "correct the function") from error


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether ``count`` positional arguments can be given; True where the function does not tell."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


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
