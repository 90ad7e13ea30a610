"""Threads under the names that profilers read."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from paceline.tracing.recorder import name_threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads are named through /proc, which is Linux'")
def test_threads_are_named_and_the_process_is_not() -> None:
    main = Path(f"/proc/self/task/{threading.main_thread().native_id}/comm")
    before = main.read_text()
    done = threading.Event()
    worker = threading.Thread(target=done.wait, name="paceline-checkpoint-of-many-letters")
    worker.start()
    try:
        name_threads()
        assert Path(f"/proc/self/task/{worker.native_id}/comm").read_text() == "checkpoint-of-m\n"
        assert main.read_text() == before
    finally:
        done.set()
        worker.join()
    name_threads()  # one that has ended is passed over
