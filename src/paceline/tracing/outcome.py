"""What the windows of a run have to say, at its end or later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UserError
from paceline.records import TraceRecord
from paceline.tracing.budgets import Budgets, budget
from paceline.tracing.judge import Verdict, verdict
from paceline.tracing.telling import told
from paceline.tracing.window import Window, read_facts, read_window, windows_in


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


def trace_record(folder: Path) -> TraceRecord:
    """What a person is told of a window; also where its files cannot be read: no run fails of that."""
    # as the recorder named it
    first, last = map(int, folder.name.split("-")[1:])
    try:
        if read_facts(folder / "rank0.window.json").kind == "nsys":
            text = "in the report of nsys, where it listened"
        else:
            _, budgets, found = outcome(folder)
            text = told(found, budgets)
    except UserError as error:
        text = str(error)
    return TraceRecord(folder=str(folder), first_step=first, last_step=last, told=f"{folder.name}: {text}")


def trace_records(run_folder: Path) -> Iterator[TraceRecord]:
    """Of all windows of a run, in the order of its steps."""
    return map(trace_record, windows_in(run_folder))
