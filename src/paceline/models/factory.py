"""A model that a user's own function builds."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.errors import ModelError, nearest


def build(reference: str, num_labels: int) -> nn.Module:
    """The module that ``reference``, a ``package.module:function``, returns for ``num_labels=N``.

    Raises:
        ModelError: it cannot be imported or called, or returns something else.
    """
    function = import_function(reference)
    try:
        with _current_folder_importable():
            model = function(num_labels=num_labels)
    except Exception as error:
        why = f"{type(error).__name__}: {error} ({_last_frame(error)})"
        fix = f"define it as: def {reference.partition(':')[2]}(num_labels): ..." * isinstance(error, TypeError)
        raise ModelError(f"model.factory = {reference}: failed when called with num_labels={num_labels}", why, fix) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.factory = {reference}: returned {type(model).__name__}", "an nn.Module is needed", "return the model"
        )
    return model


def import_function(reference: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names, from the current folder or the environment.

    Raises:
        ModelError: no such module or function, or an error while the module was imported.
    """
    module_name, _, name = reference.partition(":")
    what = f"model.factory = {reference}"
    try:
        with _current_folder_importable():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ModelError(
                f"{what}: there is no module {missing}",
                "looked in the current folder and in the environment",
                "run where the file is, or install the package it is in",
            ) from None
        raise ModelError(f"{what}: cannot be imported", f"it needs the module {missing}", f"install {missing}") from error
    except Exception as error:
        raise ModelError(f"{what}: cannot be imported", f"{type(error).__name__}: {error} ({_last_frame(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        why = "it is not a function" if function is not None else nearest(name, known)
        raise ModelError(f"{what}: {module_name} has no function {name}", why)
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
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


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no frame"
