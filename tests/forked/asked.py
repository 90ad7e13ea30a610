"""What an interpreter is asked to be: its words, variables, files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Reach a server that is in the group of who is meant."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an interpreter is asked to run."""

    kind: str
    """``-m``, ``-c`` or ``script``."""
    what: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A process."""

    words: tuple[str, ...]
    program: Program
    folder: str
    variables: dict[str, str]
    files: tuple[int, ...]
    """The numbers under which it has the files that are sent."""
    session: bool
    group: int
    umask: int
    ignored: tuple[int, ...]
    """Signals that are ignored by who asks, and so by what that starts."""


def program(words: Sequence[Any]) -> Program | None:
    """What an interpreter of the tests is asked to run; None where it is another program, or one is to be started."""
    words = [os.fsdecode(word) for word in words]
    options, left = list[str](), words[1:]
    if words[0] != sys.executable:
        return None
    while left and left[0] in ("-W", "-I", "-S", "-P", "-u"):
        options += left[: 1 + (left[0] == "-W")]
        left = left[1 + (left[0] == "-W") :]
    isolated = "-I" in options or "-S" in options
    if left[:1] in (["-m"], ["-c"]) and len(left) > 1 and not isolated:
        return Program(kind=left[0], what=left[1], arguments=tuple(left[2:]), options=tuple(options))
    # in isolation only what makes place for a command of this kind, and knows nothing of what is imported
    if left and not left[0].startswith("-") and (not isolated or left[0].endswith("/contract/bound.py")):
        return Program(kind="script", what=left[0], arguments=tuple(left[1:]), options=tuple(options))
    return None
