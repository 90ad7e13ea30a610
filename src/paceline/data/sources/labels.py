"""The task that a column of labels is for, and its labels."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.sources.cells import Cell
from paceline.data.sources.label_column import Interpreted, LabelColumn
from paceline.data.sources.label_lists import no_such_columns
from paceline.data.task_rows import rows_of
from paceline.recipe.tasks import task_names


def interpret(
    cells: Sequence[Cell], task: str, column: str, file: str = "", *, places: Sequence[str] = (), point: str = "auto"
) -> Interpreted:
    """Decide what a column of labels holds, and which rows do not fit.

    Args:
        cells: one for each row; not empty.
        task: ``auto``, or the name of a task.
        column, file, places, point: as ``LabelColumn`` takes them.

    Raises:
        DataError: the labels cannot be of the task that was asked for, or are hardly labels at all.
    """
    whole = LabelColumn(cells, column, file, places=places, point=point)
    if places and not whole.holds_lists:
        raise no_such_columns(file, column, places, "holds no lists of 0 and 1")
    if task != "auto":
        return rows_of(task).read(whole, is_guess=False)
    kind = next(name for name in task_names() if rows_of(name).takes(whole))
    return rows_of(kind).read(whole, is_guess=True)
