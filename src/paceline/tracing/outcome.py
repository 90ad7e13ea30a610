"""What the windows of a run have to say, at its end or later."""

from __future__ import annotations

from pathlib import Path

from paceline.contract.errors import UserError
from paceline.contract.records import TraceRecord
from paceline.tracing.budgets import Budgets, budget
from paceline.tracing.judge import Verdict, verdict
from paceline.tracing.telling import told
from paceline.tracing.window import Window, read_facts, read_window


def outcome(folder: Path) -> tuple[Window, Budgets, Verdict]:
    """A window with its budgets and verdict.

    Args:
        folder: ``trace/steps-<first>-<last>`` of a run.

    Raises:
        UserError: the window's files are missing, damaged, or nsys' own.
    """
    window = read_window(folder)
    budgets = budget(window)
    return window, budgets, verdict(window, budgets)


def window_told(folder: Path) -> str:
    """What a person is told of a window.

    Raises:
        UserError: its files are missing or damaged.
    """
    if read_facts(folder / "rank0.window.json").kind == "nsys":
        return f"{folder.name}: in the report of nsys, where it listened"
    _, budgets, found = outcome(folder)
    return f"{folder.name}: {told(found, budgets)}"


def trace_record(folder: Path) -> TraceRecord:
    """The same of a window that a run has just recorded; also where it cannot be read: no run fails of that."""
    # as the recorder named it
    first, last = map(int, folder.name.split("-")[1:])
    try:
        text = window_told(folder)
    except UserError as error:
        text = f"{folder.name}: {error}"
    return TraceRecord(folder=str(folder), first_step=first, last_step=last, told=text)
