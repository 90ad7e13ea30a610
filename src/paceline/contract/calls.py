"""Where threads of this process are, for people who ask why it does not get on."""

from __future__ import annotations

import sys
import threading

MOST = 3
"""Calls that are told of a thread: the innermost."""

HANDLER = "_ask (contract/stop.py:"
"""A signal's own handler, while an import is seen through: what lies below it is told."""


def innermost_calls(thread: threading.Thread) -> str:
    """The innermost calls of a thread, the last one first; empty where it has none."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None:
        file = "/".join(frame.f_code.co_filename.split("/")[-2:])
        calls.append(f"{frame.f_code.co_name} ({file}:{frame.f_lineno})")
        if calls[-1].startswith(HANDLER):
            calls.clear()
        frame = frame.f_back
    return ", called by ".join(calls[:MOST])


def at_work(named: str) -> str:
    """The innermost calls of the main thread, and of the threads whose name begins so and who have something to do."""
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread.name.startswith(named)]
    found = [innermost_calls(main), *map(innermost_calls, others)]
    # an idle thread of a pool waits for work in the pool's own code
    return "; ".join(calls for calls in found if calls and not calls.startswith("_worker (futures/thread.py:"))
