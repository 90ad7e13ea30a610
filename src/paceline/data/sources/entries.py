"""Entries of a folder of data, by what they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from paceline.data.sources.lines import unreadable
from paceline.data.sources.links import is_broken


class Entries(NamedTuple):
    """Entries of one folder without the hidden ones, each list sorted by name."""

    folders: list[Path]
    files: list[Path]
    broken: list[Path]
    """Links to nothing."""
    special: list[Path]
    """Pipes, sockets and devices."""
    links: list[Path]
    """Those of ``folders`` and ``files`` that are links."""


def entries_of(folder: Path) -> Entries:
    """List a folder; links count as what they lead to.

    Raises:
        DataError: the folder cannot be read.
    """
    found = Entries([], [], [], [], [])
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                is_folder, is_file = _kind_of(entry)
                if is_folder or is_file:
                    (found.folders if is_folder else found.files).append(path)
                    found.links.extend([path] * entry.is_symlink())
                else:
                    (found.broken if is_broken(path) else found.special).append(path)
    except OSError as error:
        raise unreadable(str(folder), error) from None
    for paths in found:
        paths.sort()
    return found


def _kind_of(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Return whether an entry is a folder, and whether it is a file; a link that leads to itself is neither."""
    try:
        return entry.is_dir(), entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False, False
