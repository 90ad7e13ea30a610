"""What a run started from: versions, commit and time."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from paceline.machine.facts import version_of

_PACKAGES = ("paceline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "scikit-learn")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a run's numbers; None where one is not installed."""
    return {"python": platform.python_version(), **{package: version_of(package) for package in _PACKAGES}}


def git_state(folder: Path, timeout_seconds: float = 5.0) -> dict[str, Any] | None:
    """``commit``, and ``dirty``: whether tracked files differ from it (None: git took too long). None without git."""

    def git(*arguments: str) -> str:
        # no optional locks: never disturb the user's own git; no fsmonitor: it is a program that a repository names
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=timeout_seconds, check=True, stdin=subprocess.DEVNULL
        )
        return done.stdout.decode(errors="replace").strip()

    try:
        commit = git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": commit, "dirty": None}


def now(timespec: Literal["seconds", "microseconds"] = "seconds") -> str:
    """The local time with its offset."""
    return datetime.now().astimezone().isoformat(timespec=timespec)
