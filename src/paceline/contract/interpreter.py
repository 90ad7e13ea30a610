"""Command lines that start a Python; every Python of ours is started by one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def python(*words: str) -> list[str]:
    """Return the command that starts this Python on ``words``.

    ``-P``: the current folder is not searched for modules. ``python -m`` would search it first, and a user's
    ``json.py`` would be executed in place of the standard library's.
    """
    return [sys.executable, "-P", *words]


def own_program() -> list[str]:
    """Return the command line of this process, interpreter and all, without the arguments of the program."""
    arguments = sys.argv[1:]
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if sys.orig_argv[len(program) + 1 :] != arguments or not program:
        # another program calls us with arguments of its own making
        return python("-m", "paceline")
    # a script finds its neighbours, and ``-m paceline`` leaves the current folder out by itself
    return [sys.executable, *program]


def bound(command: Sequence[str]) -> list[str]:
    """Return ``command`` so that it ends with the thread of this process that starts it, see ``bound.py``."""
    return python("-I", "-S", str(Path(__file__).with_name("bound.py")), str(os.getpid()), *command)
