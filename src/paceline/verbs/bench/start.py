"""Starting the ranks that are measured. Nothing here needs torch, so that mistakes are told at once."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Any

from paceline.contract.errors import UserError, excerpt
from paceline.machine.cluster import find_place
from paceline.machine.facts import this_machine
from paceline.verbs.launch import Gpus, choose_ranks, launch, rank_command, without_launch


def start_ranks(*, gpus: Gpus | None, devices: str | None, processes: int | None) -> int | None:
    """Run this command as several ranks of this machine; the exit code, or None where this process is a rank.

    Without options: all GPUs, or two processes where there are fewer than two GPUs.

    Raises:
        UserError: the options contradict one another, the machine or the environment.
    """
    options: dict[str, Any] = {"gpus": gpus, "devices": devices, "processes": processes}
    if not any(value is not None for value in options.values()):
        if find_place(os.environ).is_rank:
            return None
        facts = this_machine()
        num_gpus = len(facts.gpus) if facts.cuda_problem is None else 0
        options["gpus" if num_gpus > 1 else "processes"] = max(num_gpus, 2)
    command = shlex.join(["paceline", *without_launch(sys.argv[1:])])
    return launch(rank_command(), choose_ranks(command, this_machine, os.environ, **options))


def parse_size(text: str) -> int:
    """Bytes of ``64M``, ``512 KiB`` or ``1048576``; k, M and G are binary.

    Raises:
        UserError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,9})\s*([kmg])?(i?b)?", text.strip().lower())
    number = int(found[1]) * 1024 ** (" kmg".index(found[2] or " ")) if found else 0
    if not 2**10 <= number <= 2**32:
        raise UserError(f"--largest {excerpt(text)}", "it is a size from 1K to 4G", "--largest 64M")
    return number
