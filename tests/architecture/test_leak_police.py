"""The checks of tests/conftest.py catch what they are for: each kind of leak is planted and must fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

PLANTED = {
    "variable": ("import os; os.environ['PLANTED'] = '1'", "environment variable PLANTED = '1'"),
    "thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(9,), name='planted', daemon=True).start()",
        "thread 'planted'",
    ),
    "process": (
        "import builtins, subprocess; builtins.planted = subprocess.Popen(['sleep', '9'])",
        "child process",
    ),
    "file": ("from pathlib import Path; Path(__file__).parents[1].joinpath('planted').touch()", "planted in the rep"),
    "dtype": ("import torch; torch.set_default_dtype(torch.float64)", "torch default dtype = torch.float64"),
    "deterministic": ("import torch; torch.use_deterministic_algorithms(True)", "torch deterministic algorithms"),
    "precision": ("import torch; torch.backends.fp32_precision = 'tf32'", "fp32_precision = tf32"),
    "threads": ("import torch; torch.set_num_threads(3)", "torch threads = 3"),
    "group": (
        "import torch.distributed as d; d.init_process_group('gloo', rank=0, world_size=1, store=d.HashStore())",
        "an open process group",
    ),
}

HONEST = """
import os, socket, pytest

def test_first(monkeypatch):
    monkeypatch.setenv("RESTORED", "1")
    assert "RESTORED" in os.environ

def test_surroundings(tmp_path):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "paceline-tests-" in os.environ["PACELINE_CACHE"] + os.environ["HF_HOME"]
    with socket.socket() as outside, pytest.raises(OSError, match="loopback only"):
        outside.connect(("192.0.2.1", 80))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
"""


@pytest.mark.slow
def test_each_planted_leak_fails_and_honest_tests_pass(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(CONFTEST, tests)
    shutil.copytree(CONFTEST.with_name("forked"), tests / "forked")  # it imports both
    shutil.copy(CONFTEST.with_name("sampling.py"), tests)
    bodies = "".join(f"def test_{name}():\n    {code}\n\n" for name, (code, _) in PLANTED.items())
    (tests / "test_planted.py").write_text("import torch.distributed\n\n" + bodies + HONEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    for name, (_, message) in PLANTED.items():
        section = re.search(rf"ERROR at teardown of test_{name} .*?(?=\n_{{3,}}|\n=)", done.stdout, re.DOTALL)
        assert section, f"the planted {name} leak did not fail:\n{done.stdout}"
        assert message in section[0], f"the {name} leak is not named: {section[0]}"
    assert f"{len(PLANTED) + 2} passed, {len(PLANTED)} errors" in done.stdout, (
        f"a leak was not put back, or an honest test failed:\n{done.stdout}"
    )
