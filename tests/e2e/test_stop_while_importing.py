"""A signal in the middle of an import: the import is seen through, and the stop comes right after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.contract.signals import STOPPED_FILE
from paceline.contract.stop import Stop

HOOK = """
import itertools, os, sys
count = itertools.count(1)  # several threads import

def hook(event, arguments, at={at}, number={number}):
    if event == "import" and next(count) == at:
        if not os.path.exists("run/metrics.jsonl") or open("run/metrics.jsonl").read().count('"kind": "step"') < 4:
            open("in time", "w")  # after the last step the run is seen through
        os.kill(os.getpid(), number)

sys.addaudithook(hook)
sys.argv = ["paceline", *{words!r}]
from paceline.__main__ import main

main()
"""

TRAIN = ["train", "recipe.yaml", "--out", "run"]
RECIPE = """
model: {config: {model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
  intermediate_size: 16, max_position_embeddings: 32}}
data: {source: "builtin:random", random: {samples: 32, length: 8, vocabulary: 200}}
loop: {epochs: 1, batch_size: 8}
observe: {console: plain}
device: cpu
"""


def ended(folder: Path, words: list[str], at: int, number: int) -> subprocess.CompletedProcess[str]:
    """The command, sent a signal at the ``at``-th import of a module."""
    (folder / "recipe.yaml").write_text(RECIPE)
    code = HOOK.format(at=at, number=int(number), words=words)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", STOPPED_FILE: "word"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100, check=False)


def check(done: subprocess.CompletedProcess[str], folder: Path, number: signal.Signals, at: int) -> None:
    told = f"{number.name} at import {at}: exit code {done.returncode}\n{done.stderr}"
    assert done.returncode == 75, told
    assert "Traceback" not in done.stderr, told
    assert f"stopped by {number.name}" in done.stderr, told
    assert (folder / "word").read_text() == f"stopped by {number.name}\n", f"{told}\na script does not hear of it"
    assert not (folder / "run" / "summary.json").exists(), f"{told}\nthe run went on to its end"


@pytest.mark.parametrize(("at", "number"), [(26, signal.SIGUSR2), (40, signal.SIGTERM), (2500, signal.SIGHUP)])
def test_a_stop_during_imports(tmp_path: Path, at: int, number: signal.Signals) -> None:
    check(ended(tmp_path, TRAIN, at, number), tmp_path, number, at)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stop_at_imports_all_along(tmp_path: Path) -> None:
    """From where paceline itself is loaded until the run makes steps; the signals take turns."""
    for turn, at in enumerate(range(40, 4000, 260)):
        folder = tmp_path / str(at)
        folder.mkdir()
        number = Stop.SIGNALS[turn % len(Stop.SIGNALS)]
        done = ended(folder, TRAIN, at, number)
        if not (folder / "in time").exists():  # also where a whole run imports fewer modules, and got no signal
            break
        check(done, folder, number, at)
    assert turn > 10, f"nothing was tried after import {at - 260}: exit code {done.returncode}\n{done.stderr}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_makes_no_run(tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = ["plan", "recipe.yaml", "--gpu", "24GiB", "--set", "device=auto"]
    done = ended(tmp_path, words, 150, number)
    assert done.returncode == code, done.stderr
    assert done.stderr == f"paceline: {'interrupted' if code == 130 else f'stopped by {number.name}'}\n"
