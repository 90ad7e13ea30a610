"""What happens to rows that cannot be used: the first one stops the run, or they are dropped, counted and kept aside.

Only problems of a single row come here. What is wrong with a whole file (an unclosed quote swallows the rows that
follow it, a cut gzip file hides them) always stops the run, because nobody can say what would be lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.contract.errors import DataError, excerpt
from paceline.contract.files import write_atomically
from paceline.contract.label_names import listed

EXCERPT_CHARACTERS = 200
"""How much of a dropped row the quarantine file shows; the row itself stays in the user's file."""


class BadRows:
    """Stops at the first bad row (``stop``), or collects them (``skip``) until ``settle`` gives the verdict.

    Args:
        policy: ``stop`` or ``skip``: the recipe's ``data.on_bad_row``.
        allowed: share of all rows that may be dropped before the run stops.
        quarantine: file to which dropped rows are written as JSON lines ``{file, line, problem, row}``; may be None.
    """

    def __init__(self, policy: Literal["stop", "skip"], allowed: float, quarantine: Path | None = None) -> None:
        self._policy, self._allowed, self._quarantine = policy, allowed, quarantine
        self._dropped: list[tuple[DataError, str]] = []

    def __len__(self) -> int:
        """Number of rows dropped so far."""
        return len(self._dropped)

    def report(self, error: DataError, row: str) -> None:
        """Drop one row; ``row`` is its text, of which an excerpt is kept.

        Raises:
            DataError: ``error`` itself, when bad rows stop the run.
        """
        if self._policy == "stop":
            # where the error was made or caught says nothing to the person who reads it
            raise error.with_traceback(None) from None
        self._dropped.append((error, row[:EXCERPT_CHARACTERS]))

    def settle(self, kept: int) -> tuple[str, ...]:
        """Write the quarantine file and give the notice that counts what was dropped, beside ``kept`` good rows.

        Raises:
            DataError: more was dropped than is allowed; names the count, the share and the first three rows.
            DiskFullError: no room for the quarantine file.
        """
        if not self._dropped:
            return ()
        if self._quarantine is not None:
            write_atomically(self._quarantine, b"".join(_json_line(error, row) for error, row in self._dropped))
        count, total = len(self._dropped), len(self._dropped) + kept
        share = count / total
        by_problem = Counter(error.problem for error, _ in self._dropped)
        kinds = listed([f"{times:,} × {problem}" for problem, times in by_problem.most_common()])
        where = f"; see {self._quarantine}" if self._quarantine is not None else ""
        if share > self._allowed:
            first = "; ".join(str(error).split("\n", 1)[0] for error, _ in self._dropped[:3])
            raise DataError(
                f"{count:,} of {total:,} rows ({share:.1%}) cannot be used",
                why=f"data.bad_rows_allowed = {self._allowed:g} allows {self._allowed:.1%}. {kinds}. First: {first}",
                fix=f"repair the rows{where}, or --set data.bad_rows_allowed={_round_up(share)}",
            )
        return (f"dropped {count:,} of {total:,} rows ({share:.2%}): {kinds}{where}",)


def cell_text(value: Any) -> str:
    """A cell as a message shows it: text as it is, of others what ``repr`` gives where that has an end."""
    try:
        return value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # integers of over 4,300 digits; lists in lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"


def row_text(values: Mapping[str, Any]) -> str:
    """A row as ``column=value`` on one line, each value shortened, for excerpts."""
    return ", ".join(f"{column}={excerpt(cell_text(value), 80)}" for column, value in values.items())


def _json_line(error: DataError, row: str) -> bytes:
    problem = f"column {error.column!r}: {error.problem}" if error.column else error.problem
    return (json.dumps({"file": error.file, "line": error.line, "problem": problem, "row": row}) + "\n").encode()


def _round_up(share: float) -> float:
    """The smallest share in whole percent that would have let this run pass."""
    return min(1.0, (int(share * 100) + 1) / 100)
