"""The command on two ranks, in processes of its own, of which the memory of one is full."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.test_out_of_memory import Full
from tests.testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import os, sys
import pytest
from tests.e2e.test_out_of_memory import Full, fill

if os.environ.get("RANK", {planted!r}) == {rank!r}:
    fill({full!r}, pytest.MonkeyPatch())
sys.argv[0] = "paceline"
from paceline.__main__ import main

main()
"""


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    code: int
    errors: str
    ended: float
    """When it was seen to have ended, on the clock of ``time.monotonic``."""


def by_hand(place: Path, full: Full, words: Sequence[str]) -> list[Done]:
    """Two commands, one a rank, which nobody ends but they themselves; the full one's end comes first."""
    meeting = ["--init", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank"]
    ranks = (full.rank, 1 - full.rank)
    started = [_started(place, full, [*words, *meeting, str(rank)], str(rank)) for rank in ranks]
    return _ended(started)


def launched(place: Path, full: Full, words: Sequence[str]) -> Done:
    """One command, which starts two ranks."""
    return _ended([_started(place, full, [*words, "--processes", "2"], "none")])[0]


def _started(place: Path, full: Full, words: Sequence[str], planted: str) -> subprocess.Popen[str]:
    code = CODE.format(full=full, rank=str(full.rank), planted=planted)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *words],  # which ranks are started by, too
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(place / "cache"), "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[Done]:
    done = []
    try:
        for process in processes:
            _, errors = process.communicate(timeout=150)
            done.append(Done(process.returncode, errors, time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    return done
