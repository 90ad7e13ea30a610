"""A file that may not grow any further is told as a full disk is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import resource, signal, sys
from pathlib import Path
from paceline.observe.metrics_file import MetricsFile
from paceline.contract.errors import DiskFullError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
file = MetricsFile(Path(sys.argv[1]))
try:
    file._write(b"x" * 200)
except DiskFullError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are POSIX")
def test_a_limit_of_the_file_size_is_told(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path / "metrics.jsonl")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "metrics.jsonl: may not grow any further" in ended.stdout
    assert "ulimit -f" in ended.stdout


OPEN_FILES = """
import resource, sys
from paceline.contract.errors import UserError
from paceline.contract.files import require_open_files

resource.setrlimit(resource.RLIMIT_NOFILE, (16, int(sys.argv[1])))
try:
    require_open_files(32)
except UserError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of open files are POSIX")
@pytest.mark.parametrize(
    ("hard", "told"),
    [
        (64, "32\n"),
        (
            16,
            "16 open files at most (ulimit -n)\n  why: this run opens up to 32 at a time\n  fix: ulimit -n 1024\n16\n",
        ),
    ],
)
def test_a_low_limit_of_open_files_is_raised_or_told(hard: int, told: str) -> None:
    command = [sys.executable, "-c", OPEN_FILES, str(hard)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, told), ended.stderr
