"""The catalogue's entry of a task that paceline does not have: classes in an order, such as stars from 1 to 5."""

from paceline.recipe.entries import Rule, TaskEntry

ENTRY = TaskEntry(
    "ordinal",
    "One of several classes that have an order, written as numbers.",
    room="tests.tasks.ordinal",
    excludes=(
        Rule("task.label_smoothing!=0.0", "its labels are places in an order, and have no classes to spread over"),
    ),
)
