"""``evaluate`` on several ranks: the same numbers, told once, and a mistake told once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import reviews, write_csv
from tests.e2e.test_inference import train_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170), pytest.mark.usefixtures("forked_interpreters")]


def evaluated(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "evaluate", "run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_ranks_share_an_evaluation_and_say_it_once(tmp_path: Path) -> None:
    train_run(tmp_path, write_csv(tmp_path / "reviews.csv", reviews(60)))
    write_csv(tmp_path / "new.csv", [{"review": row["text"], "label": row["label"]} for row in reviews(41)])
    alone, shared = (evaluated(tmp_path, "--data", "new.csv", *more) for more in ((), ("--processes", "2")))
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    first, *rows = shared.stdout.splitlines()
    assert re.match(r"new\.csv: 41 samples in", first)
    assert rows == alone.stdout.splitlines()[1:], "loss and metrics are those of one process"
    assert shared.stderr == alone.stderr, "a guess is told once"
    own = evaluated(tmp_path, "--processes", "2")
    assert own.returncode == 0, own.stderr
    assert own.stdout.startswith("test: 6 samples in")
    wrong = evaluated(tmp_path, "--data", "nowhere.csv", "--processes", "2")
    assert wrong.returncode == 2
    assert wrong.stderr.count("nowhere.csv") == 1 or wrong.stderr.count("no such file") == 1, wrong.stderr
