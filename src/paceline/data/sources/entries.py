"""Entries of a folder of data, and links among them: those that lead nowhere, and those that lead out of it.

A folder may come from a stranger, and a link in it may name any file of this machine. So a link that leads out of the
folder is followed to a folder, to a file of its own suffix, or to one named by a digest, as the stores of DVC and of
the Hub's cache name theirs: pictures and texts that are kept elsewhere are such files, keys and passwords are not.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.contract.errors import DataError
from paceline.data.sources.lines import unreadable

_DIGEST = re.compile(r"[0-9a-f]{30,}")
"""Name of a file in a store by content: MD5 without the two digits that its folder has, SHA-1, SHA-256."""


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


def is_broken(path: Path) -> bool:
    """Return whether a path is a link to nothing."""
    return path.is_symlink() and not path.exists()


def broken_link(path: Path, name: str, count: int = 1) -> DataError:
    """Return the error for a link to nothing, of which the folder has ``count``."""
    others = f"; so do {count - 1:,} more links of the folder" if count > 1 else ""
    return DataError(
        "a link to nothing",
        file=name,
        why=f"it leads to {os.readlink(path)}, which is not there{others}",
        fix="put back what it leads to, or remove the link (--set data.on_bad_row=skip drops and counts such files)",
    )


def leads_out(path: Path, folder: Path, *, by_suffix: bool = True) -> bool:
    """Return whether a link leads out of ``folder``.

    Args:
        path: the link.
        folder: of the data.
        by_suffix: whether files are read for their suffix; of a folder without suffixes, any file would be a text.

    Raises:
        DataError: it leads to a file of another kind there, which is not read.
    """
    target = Path(os.path.realpath(path))
    if target.is_relative_to(os.path.realpath(folder)):
        return False
    is_alike = by_suffix and (not target.is_file() or target.suffix.lower() == path.suffix.lower())
    if not is_alike and not (target.is_file() and _DIGEST.fullmatch(target.name)):
        raise DataError(
            "a link to a file of another kind, out of the folder of the data",
            file=str(path),
            why=f"it leads to {target}; data from elsewhere could read any file of this machine so",
            fix="put a copy of the file in place of the link, if you trust it",
        )
    return True


def outside_notice(name: str, folder: Path, links: Sequence[Path]) -> tuple[str, ...]:
    """Return the notice that counts links which lead out of ``folder``; empty where there are none."""
    if not links:
        return ()
    count = f"{len(links):,} link{'s' * (len(links) > 1)} lead{'s' * (len(links) == 1)}"
    example = f"{links[0].relative_to(folder)} -> {os.path.realpath(links[0])}"
    return (f"{name}: {count} out of the folder, such as {example}",)
