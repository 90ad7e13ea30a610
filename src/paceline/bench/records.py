"""Records of cells: a JSON line each, on the disk as soon as it is known."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.files import disk_errors

Record = dict[str, Any]

CUT_OFF = "cut off"
"""Status of a cell that the budget ended; it is missing still."""


class Records:
    """The records of a file, the newest of each cell.

    Args:
        path: the file; a line that a crash left unfinished, or that lacks one of the fields, is passed over.
        make_room: called once where the disk is full, before the line is written again.
        key: the fields that say which cell a record is of.
        needs: the other fields that each record has.
    """

    def __init__(
        self,
        path: Path,
        make_room: Callable[[], None] = lambda: None,
        *,
        key: Sequence[str] = ("rung", "repeat"),
        needs: Sequence[str] = (),
    ) -> None:
        self._path, self._make_room, self._key = path, make_room, tuple(key)
        self._records: dict[tuple[Any, ...], Record] = {}
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                record = json.loads(line)
                if isinstance(record, dict) and {*key, *needs} <= record.keys():
                    self._keep(record)
            except (ValueError, TypeError):  # no JSON; a key that names nothing, such as a list
                continue

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def get(self, *cell: Any) -> Record | None:
        """The record of a cell, by the fields of the key."""
        return self._records.get(cell)

    def forget(self, statuses: tuple[str, ...]) -> None:
        """Leave out records of these statuses, so that their cells are missing; the file keeps them."""
        self._records = {key: each for key, each in self._records.items() if each["status"] not in statuses}

    def add(self, record: Record) -> None:
        """Keep a record, and write it down.

        Raises:
            DiskFullError: no room even after ``make_room``; what was there before is whole.
        """
        self._keep(record)
        with disk_errors(self._path):
            try:
                append(self._path, record)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._make_room()
                append(self._path, record)

    def _keep(self, record: Record) -> None:
        self._records[tuple(record[name] for name in self._key)] = record


def append(path: Path, record: Record) -> None:
    """Add a record's whole line to a file, on the disk, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a crash cut the last one off
        try:
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
