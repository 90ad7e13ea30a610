"""The command line of this process, as its ranks run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.contract.interpreter import own_program

OPTIONS = ("--gpus", "--processes", "--devices")
"""What makes a command start ranks; each takes a value."""


def rank_command() -> list[str]:
    """This process's own command line, interpreter and all, without the options that start ranks."""
    return [*own_program(), *without_launch(sys.argv[1:])]


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
