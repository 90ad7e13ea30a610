"""The kinds of tasks: the values of ``task.type``, each with its room.

``auto`` asks them in this order whether a column of labels is theirs; the first that takes it has it.
"""

from __future__ import annotations

from paceline.recipe.entries import TaskEntry

ONE_CLASS = "classification"
"""The task of built-in data sets, and of a plan that reads no data."""

TASKS: tuple[TaskEntry, ...] = (
    TaskEntry(
        "multi_label",
        "Any number of labels a sample, each decided independently.",
        room="paceline.tasks.multi_label",
    ),
    TaskEntry("regression", "A number a sample.", room="paceline.tasks.regression"),
    TaskEntry(
        ONE_CLASS,
        "One of several classes a sample.",
        room="paceline.tasks.classification",
        benched=True,
    ),
)
