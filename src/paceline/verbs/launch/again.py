"""Running this very command again, as several ranks."""

from __future__ import annotations

import os
import shlex
import sys

from paceline.machine.facts import this_machine
from paceline.verbs.launch.command import rank_command, without_launch
from paceline.verbs.launch.launcher import launch
from paceline.verbs.launch.ranks import Gpus, choose_ranks


def launch_if_asked(*, gpus: Gpus | None, devices: str | None, processes: int | None) -> None:
    """Run this command as the ranks that its options ask for, and end with their exit code; nothing without options.

    Raises:
        UserError: the options contradict one another, the machine or the environment.
        SystemExit: the ranks have ended.
    """
    if gpus is None and devices is None and processes is None:
        return
    command = shlex.join(["paceline", *without_launch(sys.argv[1:])])
    ranks = choose_ranks(command, this_machine, os.environ, gpus=gpus, devices=devices, processes=processes)
    raise SystemExit(launch(rank_command(), ranks))
