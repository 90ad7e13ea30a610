"""The command line of this process, as its ranks run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

OPTIONS = ("--gpus", "--processes", "--devices")
"""What makes a command start ranks; each takes a value."""


def rank_command() -> list[str]:
    """This process's own command line, interpreter and all, without the options that start ranks."""
    arguments = sys.argv[1:]
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if sys.orig_argv[len(program) + 1 :] != arguments or not program:
        # another program calls us with arguments of its own making
        program = ["-m", "paceline"]
    return [sys.executable, *program, *without_launch(arguments)]


def without_launch(arguments: Sequence[str]) -> list[str]:
    """The arguments without the options that start ranks, and their values."""
    kept, rest = [], iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in OPTIONS:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept
