"""Links in a folder of data: those that lead nowhere, and those that lead out of the folder.

A folder may come from a stranger, and a link in it may name any file of this machine. So a link that leads out of the
folder is followed to a folder, to a file of its own suffix, or to one named by a digest, as the stores of DVC and of
the Hub's cache name theirs: pictures and texts that are kept elsewhere are such files, keys and passwords are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.errors import DataError

_DIGEST = re.compile(r"[0-9a-f]{30,}")
"""Name of a file in a store by content: MD5 without the two digits that its folder has, SHA-1, SHA-256."""


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
