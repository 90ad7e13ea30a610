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
