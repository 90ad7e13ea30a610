"""Guesses, warnings and progress of the verbs that have no console of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paceline.contract.redaction import without_credentials
from paceline.contract.streams import write_error


def tell(message: str) -> None:
    """Print a notice on standard error, so that standard output holds the result alone."""
    write_error(f"info: {without_credentials(message)}")


@contextlib.contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """Counts on a terminal for as long as it lasts, and nowhere else; inside, call the function with each addition."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:,} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda count: progress.update(task, advance=count)
