"""transformers, imported without the packages that it loads for one function each."""

from __future__ import annotations

import contextlib
import importlib
import sys
from functools import partial
from typing import Any

from paceline.contract.errors import UserError

_LATE = {
    "is_sklearn_available": ("sklearn.metrics", "roc_curve"),
    "is_scipy_available": ("scipy.optimize", "linear_sum_assignment"),
}
"""What modules of transformers ask before they import a function, and the function."""

_ASKING = ("transformers.generation.candidate_generator", "transformers.loss.loss_utils")


def import_transformers() -> None:
    """Import what transformers' readers and models bring along, but for scikit-learn, SciPy and pandas.

    Its assisted generation and its losses of object detection take one function each from them, which costs a second of
    every start. Here the functions come when they are called, as some do in later versions. Where the packages are
    loaded already, nothing is gained and nothing changed.

    Raises:
        UserError: Python has dropped docstrings, from which transformers composes those of its models as it loads them.
    """
    if sys.flags.optimize > 1:
        why = "transformers reads the docstrings of its models, which Python drops there"
        raise UserError("PYTHONOPTIMIZE=2, or python -OO: transformers cannot be loaded", why, "unset PYTHONOPTIMIZE")
    from transformers import utils

    if any(package in sys.modules for package in ("sklearn", "scipy")):
        return
    # a version without these questions has no need of this, and one without these modules imports them elsewhere
    answers = {question: getattr(utils, question) for question in _LATE if hasattr(utils, question)}
    for question in answers:
        setattr(utils, question, _not_now)
    try:
        for name in _ASKING:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
    finally:
        for question, answer in answers.items():
            setattr(utils, question, answer)
            for name in [name for name in sys.modules if name.startswith("transformers.")]:
                _answer(sys.modules[name], question, answer)


def _answer(module: Any, question: str, answer: Any) -> None:
    """Put the real answer into a module that was told no, and the function that it did without."""
    if vars(module).get(question) is _not_now:  # not by getattr: some modules import what they are asked for
        setattr(module, question, answer)
        origin, function = _LATE[question]
        vars(module).setdefault(function, partial(_call, origin, function))


def _not_now() -> bool:
    return False


def _call(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments, **options)
