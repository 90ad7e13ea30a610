"""The lists in which Slurm writes nodes and counts, read without ``scontrol``, which containers often lack."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from paceline.contract.errors import UserError, excerpt

_PARTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""What stands between two commas that are in no brackets."""

_NUMBERS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)

MOST_NODES = 65_536
"""More than any Slurm cluster has (its limit, MAX_SLURM_NODES)."""


def nodes(text: str, variable: str = "SLURM_JOB_NODELIST") -> list[str]:
    """The names in Slurm's short form of them: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login.

    The grammar is that of ``scontrol show hostnames``: brackets may stand anywhere and more than once, zeros in front
    are kept, and the last brackets count fastest.

    Args:
        variable: where the text was found; for the message.

    Raises:
        UserError: it is no such list.
    """
    if not text or ",".join(_PARTS.findall(text)) != text:
        raise _no_list(variable, text)
    found: list[str] = []
    for part in _PARTS.findall(text):
        # what is not in brackets has even places
        pieces = _NUMBERS.split(part)
        choices = [
            list(itertools.islice(_numbers(piece, variable, text), MOST_NODES)) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        found += itertools.islice(map("".join, itertools.product(*choices)), MOST_NODES)
    return found[:MOST_NODES]


def counts(text: str, variable: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """The numbers of tasks, node by node: ``4(x2),1`` is 4, 4, 1.

    Raises:
        UserError: it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"{variable}={excerpt(text)}", "Slurm writes counts as 4(x2),1", f"unset {variable}, or start with srun"
            )
        found += [int(match[1])] * min(int(match[2] or 1), MOST_NODES)
    return found


def _numbers(inside: str, variable: str, text: str) -> Iterator[str]:
    """``01-03,7`` -> 01, 02, 03, 7."""
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_list(variable, text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_list(variable, text)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def _no_list(variable: str, text: str) -> UserError:
    why = "Slurm writes nodes as node1 or gpu[01-03,7],login"
    return UserError(f"{variable}={excerpt(text)}", why, "start with srun, or set MASTER_ADDR to the first node")
