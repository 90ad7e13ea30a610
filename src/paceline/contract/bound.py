"""A command that lives no longer than the process that starts it: ``python bound.py PARENT COMMAND ARGUMENT ...``.

On Linux the kernel kills the command when PARENT (a process id) dies, by kill -9 too. The request has to be made in the
child, and a little program between the two is the way to do it that is safe in a parent with threads: the parent runs
no Python between fork and exec, and the request outlives this program's own exec. A thread of the command that watched
a pipe would do nothing while other code of the process holds the interpreter, as a collective that hangs may.

Standard library only, and run with -I -S: it starts in some hundredths of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that has a process get a signal when its parent ends."""

NOT_STARTED = 127
"""As shells exit when a command cannot be run."""


def main(parent: int, command: list[str]) -> None:
    """Become ``command``; never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # a parent that died before the request is noticed here
    if os.getppid() == parent:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"paceline: {command[0]}: {error.strerror}\n")
    os._exit(NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
