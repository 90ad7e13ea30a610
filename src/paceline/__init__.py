"""paceline: fine-tune PyTorch models at the speed of the hardware.

Importing paceline loads neither torch nor transformers; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module

from paceline._version import __version__

TYPE_CHECKING = False  # as type checkers know it too; loading typing takes as long as all the rest, deaf to signals
if TYPE_CHECKING:
    from typing import Any

    from paceline.contract.records import RunRecord
    from paceline.contract.spans import listening, mark, pop, push, span
    from paceline.engine.adopt import adopt
    from paceline.recipe import Recipe
    from paceline.verbs.doctor import doctor
    from paceline.verbs.evaluate import evaluate
    from paceline.verbs.plan import plan
    from paceline.verbs.predict import predict
    from paceline.verbs.train import resume, train

__all__ = [
    "Recipe",
    "RunRecord",
    "__version__",
    "adopt",
    "doctor",
    "evaluate",
    "listening",
    "mark",
    "plan",
    "pop",
    "predict",
    "push",
    "resume",
    "span",
    "train",
]

_HOMES = {
    "Recipe": "paceline.recipe",
    "RunRecord": "paceline.contract.records",
    "adopt": "paceline.engine.adopt",
    "doctor": "paceline.verbs.doctor",
    "evaluate": "paceline.verbs.evaluate",
    "listening": "paceline.contract.spans",
    "mark": "paceline.contract.spans",
    "plan": "paceline.verbs.plan",
    "pop": "paceline.contract.spans",
    "predict": "paceline.verbs.predict",
    "push": "paceline.contract.spans",
    "resume": "paceline.verbs.train",
    "span": "paceline.contract.spans",
    "train": "paceline.verbs.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
