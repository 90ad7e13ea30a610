"""A ladder while it is climbed: on a terminal the table with its bars, elsewhere a line a cell; on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from paceline.observe.formats import duration
from paceline.verbs.notices import tell

if TYPE_CHECKING:
    from rich.live import Live

    from paceline.bench.ladder import Outlook


class Screen:
    """Shows what it is told, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live: Live | None = None
        self._shown: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(f"info: {line}")
        else:
            tell(line)

    def show(self, outlook: Outlook) -> None:
        """The table so far, and what is measured now."""
        from paceline.bench.table import rows_shown

        left = "" if outlook.left is None else f", {duration(outlook.left)} left"
        now = f"measuring {outlook.running} ({outlook.done + 1} of {outlook.total}{left})" if outlook.running else ""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join([*rows_shown(outlook.rows), "", now])), refresh=True)
        elif now:
            tell(now)
