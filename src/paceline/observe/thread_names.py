"""Names of this process's threads, told to the operating system, where profilers read them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

LONGEST = 15
"""Bytes that Linux keeps of a thread's name."""


def name_threads() -> None:
    """Give every thread but the main one, whose name is the process's, the name it has in Python.

    Python does so itself from 3.14 on. Where the system has no such file, or refuses it, names stay as they are: they
    are for people who look at a trace, and no run fails of them.
    """
    main = threading.main_thread()
    for thread in threading.enumerate():
        if thread is main or thread.native_id is None:
            continue
        name = thread.name.removeprefix("paceline-").encode()[:LONGEST]
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{thread.native_id}/comm").write_bytes(name)
