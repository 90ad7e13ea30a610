"""The file that ``predict`` writes: every row as it was, its predicted label and the probabilities.

Rows are kept in a file beside the result until all are there, since only then it is known which columns there are;
so the memory holds one piece of them, and the result appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import UserError
from paceline.contract.files import disk_errors, replacing
from paceline.tasks.predictions import predictions_of

Ids = NDArray[np.int64]

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".jsonl": None}

_FORMULA = (*"=+-@\t\r\n", *"＝＋－＠")
"""A cell that begins so is a formula to a spreadsheet, or may become one (OWASP, CSV Injection)."""

_HALVES = "backslashreplace"
"""Half a surrogate pair, as in the name of a file that is not UTF-8, is written as JSON's escapes spell it."""


@final
class PredictionFile:
    """Takes rows and scores a piece at a time; nothing is at ``out`` before ``finish``.

    Args:
        out: .csv, .tsv or .jsonl; folders above it are made.
        source: where the rows come from, which may not be ``out`` itself.
        safe: no cell of .csv or .tsv is a formula to a spreadsheet: what begins as one gets an apostrophe before it.

    Raises:
        UserError: an unknown suffix, ``safe`` where there are no cells, or a place that cannot be written.
        DiskFullError: no room (from ``add`` and ``finish``); what was at ``out`` is intact.
    """

    def __init__(self, out: Path, source: str | None, *, safe: bool = False) -> None:
        if out.suffix not in _DELIMITERS:
            known = ", ".join(_DELIMITERS)
            raise UserError(f"-o {out}: unknown kind of file", f"written are {known}", f"-o {out.with_suffix('.csv')}")
        if source is not None and out.exists() and Path(source).exists() and os.path.samefile(out, source):
            fix = f"-o {out.with_stem(out.stem + '-labelled')}"
            raise UserError(f"-o {out}: is the input itself", "the rows would be overwritten by their copies", fix)
        self._out, self._delimiter = out, _DELIMITERS[out.suffix]
        if safe and self._delimiter is None:
            why = "a spreadsheet reads no formulas from it"
            raise UserError(f"--safe-csv: has no effect on {out.suffix}", why, f"leave it out, or -o {out.stem}.csv")
        self._cell = _safe_cell if safe else _cell
        self._columns: dict[str, None] = {}
        self._count = 0
        _require_place(out)

    def __enter__(self) -> Self:
        with disk_errors(self._out):
            try:
                self._out.parent.mkdir(parents=True, exist_ok=True)
                self._kept = tempfile.TemporaryFile(
                    "w+", dir=self._out.parent, encoding="utf-8", errors=_HALVES, newline="\n"
                )
            except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:  # gone, or a system's own folder
                raise _unwritable(self._out, f"{self._out.parent}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is tried once more, and is not wanted now
            self._kept.close()

    def add(self, rows: Sequence[Mapping[str, Any]], scores: NDArray[np.float32], lines: Ids) -> None:
        """Take rows and their scores [n, C]: probabilities, or the value itself for regression.

        ``lines`` [n] are the rows' places in their source, which the file does not hold.
        """
        with disk_errors(self._out):
            for row, found in zip(rows, scores.tolist(), strict=True):
                self._columns |= dict.fromkeys(map(str, row))
                self._kept.write(_json([row, found]) + "\n")
        self._count += len(rows)

    def finish(self, kind: str, label_names: Sequence[str], thresholds: Sequence[float] = ()) -> int:
        """Put the file in its place; returns the number of its rows.

        Args:
            thresholds: of the labels, see ``Task``.
        """
        names = _added_names(kind, label_names, self._columns)
        joined = self._delimiter is not None
        kept = (json.loads(line) for line in self._kept)
        added = partial(predictions_of(kind).cells, label_names, tuple(thresholds), joined=joined)
        rows = (row | dict(zip(names, added(scores), strict=True)) for row, scores in kept)
        with disk_errors(self._out):
            self._kept.seek(0)  # writes what is still in memory
            _write(self._out, self._delimiter, [*self._columns, *names], rows, self._cell)
        return self._count


@final
class Predictions:
    """The same in memory, for who wants rows and no file; ``rows`` are there after ``finish``."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Any], list[float]]] = []
        self.lines: list[int] = []
        """Each row's place in its source, from 1: rows that could not be used are missing."""
        self.names: list[str] = []
        """What is added to the columns of the rows."""
        self.rows: list[dict[str, Any]] = []
        """Every row as it was, followed by what is added."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def add(self, rows: Sequence[Mapping[str, Any]], scores: NDArray[np.float32], lines: Ids) -> None:
        """As ``PredictionFile.add``; values stay what they are."""
        self._kept += zip(map(dict, rows), scores.tolist(), strict=True)
        self.lines += lines.tolist()

    def finish(self, kind: str, label_names: Sequence[str], thresholds: Sequence[float] = ()) -> int:
        """Make the rows; returns their number. Arguments as ``PredictionFile.finish``."""
        self.names = _added_names(kind, label_names, dict.fromkeys(str(name) for row, _ in self._kept for name in row))
        added = partial(predictions_of(kind).cells, label_names, tuple(thresholds), joined=False)
        for row, scores in self._kept:
            self.rows.append(row | dict(zip(self.names, added(scores), strict=True)))
        return len(self.rows)


def _require_place(out: Path) -> None:
    """Refuse, before anything is computed, a place where no file can be written."""
    if out.is_dir():
        raise UserError(f"-o {out}: is a folder", "the predictions are one file", f"-o {out / 'predictions.csv'}")
    above = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise _unwritable(out, f"{above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(out, f"you may not write in {above}")


def _unwritable(out: Path, why: str) -> UserError:
    return UserError(f"-o {out}: cannot be written", why, "choose another place with -o")


def _added_names(kind: str, label_names: Sequence[str], taken: Mapping[str, None]) -> list[str]:
    """The task's columns, under names that no column of the rows has."""
    names = predictions_of(kind).columns(label_names)
    used = set(taken)
    for at in range(len(names)):
        while names[at] in used:
            names[at] += "_"
        used.add(names[at])
    return names


Cell = Callable[[Any], Any]
"""A value as it stands in a delimited file."""


def _write(out: Path, delimiter: str | None, columns: list[str], rows: Iterator[dict[str, Any]], cell: Cell) -> None:
    with replacing(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors=_HALVES, newline="")
        _write_rows(text, delimiter, columns, rows, cell)
        text.detach()  # flushes; the file is closed by whom it belongs to


def _write_rows(
    file: IO[str], delimiter: str | None, columns: list[str], rows: Iterator[dict[str, Any]], cell: Cell
) -> None:
    if delimiter is None:
        file.writelines(_json(row) + "\n" for row in rows)
        return
    writer = csv.writer(_Lines(file), delimiter=delimiter, lineterminator="\r\n")
    writer.writerow(map(cell, columns))
    writer.writerows([cell(row.get(column)) for column in columns] for row in rows)


@final
class _Lines:
    """Takes lines that end in CR LF and writes them with LF.

    Before Python 3.13 csv quotes only the line ends that it writes, so that a CR in a cell would end the row.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(line.removesuffix("\r\n") + "\n")


def _cell(value: Any) -> Any:
    """A value in a delimited file: text as it is, nothing for nothing, all else as JSON writes it."""
    if value is None or isinstance(value, str):
        return value
    return _json(value)


def _safe_cell(value: Any) -> Any:
    """As ``_cell``, but an apostrophe before text that a spreadsheet would take for a formula; numbers are none."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return _cell(value)
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """What rows in memory and parquet files may hold, and JSON does not: arrays, dates, decimals, bytes."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
