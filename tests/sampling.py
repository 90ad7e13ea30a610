"""A sample of the slow tests: those of one file in N, and of other files at another commit."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

OPTION = "--one-file-in"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        type=int,
        default=1,
        metavar="N",
        help="run the slow tests of one file in N; which files those are changes with the commit",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption(OPTION)
    slow = [item for item in items if item.get_closest_marker("slow")]
    if share == 1 or not slow:
        return
    files = sorted({item.path.relative_to(config.rootpath).as_posix() for item in slow})
    chosen = choose_files(files, share, read_commit(config.rootpath))
    left_out = [item for item in slow if item.path.relative_to(config.rootpath).as_posix() not in chosen]
    config.hook.pytest_deselected(items=left_out)
    excluded = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in excluded]


def choose_files(files: list[str], share: int, commit: str) -> set[str]:
    """Every ``share``-th of these files; the commit says with which of them it begins."""
    first = int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8], "big") % share
    return set(files[first::share])


def read_commit(folder: Path) -> str:
    """The id of the commit that is checked out; empty outside a git repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout.strip()
