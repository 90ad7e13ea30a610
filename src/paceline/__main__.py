"""``paceline`` and ``python -m paceline``: the command line, listening for signals before anything else is loaded."""

from __future__ import annotations

import os
import signal
import sys

from paceline.contract.errors import Preempted
from paceline.contract.stop import NOT_BEGUN, Stop

_RUNS = ("train", "trace")
"""Commands that make a run, which end with 75 when they are asked to stop; others by the signal's own number."""


def main() -> None:
    """Entry point of the ``paceline`` command."""
    # torch's C++ prints 15 lines of addresses for each message that it cannot send to a rank that has ended, which
    # paceline says in one; it is asked before torch is loaded
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stop = Stop(NOT_BEGUN)
    try:
        with stop:
            from paceline.verbs.cli import main as command

            command()
    except Preempted as stopped:
        if set(sys.argv[1:2]) & set(_RUNS):
            # a launcher ends the other ranks where one has failed, which is what is to be read
            from paceline.machine.cluster import rank_in

            if rank_in(os.environ) == 0:
                sys.stderr.write(f"paceline: {stopped}\n")
            sys.exit(stopped.exit_code)
        number = signal.Signals[stop.requested_by or "SIGINT"]
        word = "interrupted" if number is signal.SIGINT else f"stopped by {number.name}"
        sys.stderr.write(f"paceline: {word}\n")
        sys.exit(128 + number)


if __name__ == "__main__":
    main()
