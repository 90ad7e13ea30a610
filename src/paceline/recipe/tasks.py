"""The kinds of tasks by name, and the parts of their rooms, loaded when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.recipe.catalogue.tasks import TASKS
from paceline.recipe.entries import TaskEntry


def task_names() -> tuple[str, ...]:
    """Names of all kinds of tasks, in the order in which ``auto`` asks them."""
    return tuple(entry.name for entry in TASKS)


def task_entry(kind: str) -> TaskEntry:
    """The catalogue's entry of a kind of task.

    Raises:
        KeyError: there is no such kind.
    """
    for entry in TASKS:
        if entry.name == kind:
            return entry
    raise KeyError(kind)


def load_part(kind: str, part: str) -> Any:
    """The object with a part's upper-case name in the module ``part`` of a task's room.

    Floors below ``tasks/`` state in an abstract class which questions a part answers, and ask it through this function.

    Args:
        kind: name of a task.
        part: name of a module of its room: ``rows`` holds ``ROWS``, and so on.

    Raises:
        KeyError: there is no such kind.
    """
    return getattr(importlib.import_module(f"{task_entry(kind).room}.{part}"), part.upper())
