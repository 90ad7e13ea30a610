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
    try:
        facts = read_facts(folder / "rank0.window.json")
    except UserError as error:
        first, last = map(int, folder.name.split("-")[1:])
        return TraceRecord(folder=str(folder), first_step=first, last_step=last, told=str(error))
    try:
        if facts.kind == "nsys":
            text = f"steps {facts.first_step} to {facts.last_step} are in the report of nsys, if it listened"
        else:
            _, budgets, found = outcome(folder)
            text = told(found, budgets)
    except UserError as error:
        text = str(error)
    return TraceRecord(folder=str(folder), first_step=facts.first_step, last_step=facts.last_step, told=text)


def trace_records(run_folder: Path) -> Iterator[TraceRecord]:
    """Of all windows of a run, in the order of its steps."""
    return map(trace_record, windows_in(run_folder))
