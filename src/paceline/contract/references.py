"""``package.module:function`` in a recipe: the user's own code, named by the user."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import os
import site
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from paceline.contract.errors import PacelineError, RecipeError, nearest

LIBRARIES: Final = ("torchvision.models", "timm.models")
"""Packages of published models: what a recipe names of them is code that the person has installed."""


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
        with importable(reference):
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


def library_of(reference: str) -> str | None:
    """Return the installed library of models that a reference is in; None where it is a person's own code.

    A package of that name in the current folder, or anywhere else than where packages are installed, is no library: it
    may have come with somebody else's run folder.
    """
    module = reference.partition(":")[0]
    if not any(module == library or module.startswith(f"{library}.") for library in LIBRARIES):
        return None
    package = module.partition(".")[0]
    with current_folder_importable():
        loaded = sys.modules.get(package)
        spec = loaded.__spec__ if loaded else importlib.machinery.PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    origin = os.path.realpath(spec.origin)
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return package if any(origin.startswith(os.path.realpath(folder) + os.sep) for folder in folders) else None


def importable(reference: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the reference is imported and called: a library is not, from the current folder."""
    return contextlib.nullcontext() if library_of(reference) else current_folder_importable()


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
