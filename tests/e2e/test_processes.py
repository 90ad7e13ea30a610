"""The command in processes of its own: killed and signalled while it works, it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.e2e.whole_runs import lines, recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("forked_interpreters")]

SLOW_LOSS = """
import time
import torch
from torch.nn.functional import cross_entropy

def loss(logits, labels):
    time.sleep(0.03)
    return cross_entropy(logits, labels, reduction="none")
"""

KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
# loaded once, before the fork, for a killed start would take seconds; the optimizer loads torch._dynamo
import paceline.run.run, torch._dynamo, transformers.models.bert.modeling_bert
from paceline.verbs import cli

folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
kills = early = unfinished_saves = 0
scale, before = 1.0, None
while not (folder / "summary.json").exists():
    assert kills < 400, "the run does not get on"
    resumable = sorted((folder / "checkpoints").glob("step-*/COMMITTED"))
    if kills and resumable == before:
        scale *= 1.03  # on a slow machine a start may take longer than any kill waits
    before = resumable
    if not resumable and (folder / "recipe.yaml").exists():
        early += 1  # killed before the first checkpoint: there is nothing to go on with
        os.rename(folder, folder.with_name(f"{folder.name}-early-{early}"))
    arguments = [str(folder), "--resume", "--trust-references"] if resumable else ["recipe.yaml", "--out", str(folder)]
    child = os.fork()
    if child == 0:
        sys.argv = ["paceline", "train", *arguments]
        log = os.open(f"log-{kills}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            cli.main()
        except SystemExit as ended:
            os._exit(ended.code or 0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + rng.uniform(0.2, 0.7) * scale
    status = 0
    while time.monotonic() < deadline and not status:
        time.sleep(0.002)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.WEXITSTATUS(status) == 0, Path(f"log-{kills}.txt").read_text()
            break
    else:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):  # it had ended by itself between the last look and the kill
            assert os.WEXITSTATUS(status) == 0, Path(f"log-{kills}.txt").read_text()
            continue
        kills += 1
        unfinished_saves += any((folder / "checkpoints").glob(".*.partial-*"))
print(json.dumps({"kills": kills, "early": early, "during a save": unfinished_saves}))
"""


@pytest.fixture(scope="module")
def workplace(pretrained: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe.yaml, the user's own loss, and the undisturbed run; steps take a tenth of a second."""
    place = tmp_path_factory.mktemp("workplace")
    (place / "slow_loss.py").write_text(SLOW_LOSS)
    chosen = recipe(
        pretrained,
        reviews,
        task={"loss": "slow_loss:loss"},
        loop={"checkpoint_every": 1, "keep_last": 2},
        observe={"console": "plain", "log_every": 1},
    )
    (place / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    with started(place, "recipe.yaml", "--out", "undisturbed") as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return place


@contextmanager
def started(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``paceline train`` as a shell in the foreground would start it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(place / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def when(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until something is true of a running process's folder."""
    deadline = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def steps(folder: Path) -> int:
    """Steps in the run's metrics so far."""
    return len(lines(folder, "step")) if (folder / "metrics.jsonl").exists() else 0


def assert_as_undisturbed(place: Path, name: str) -> None:
    for file in ("model/model.safetensors", "model/config.json", "model/tokenizer.json"):
        assert (place / name / file).read_bytes() == (place / "undisturbed" / file).read_bytes(), file
    kinds = ("step", "evaluation")
    assert lines(place / name, *kinds) == lines(place / "undisturbed", *kinds)


def resume(place: Path, name: str) -> None:
    with started(place, name, "--resume", "--trust-references") as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_asked_to_stop(workplace: Path, number: signal.Signals) -> None:
    name = f"asked-{number.name}"
    with started(workplace, "recipe.yaml", "--out", name) as process:
        when(process, lambda: steps(workplace / name) >= 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors
    assert f"paceline: stopped by {number.name} after step" in errors
    assert f"paceline train {workplace / name} --resume --trust-references goes on" in errors
    assert "Traceback" not in errors
    assert steps(workplace / name) < 12, "it was not stopped"
    resume(workplace, name)
    assert_as_undisturbed(workplace, name)


def test_ctrl_c_twice(workplace: Path, real_interpreters: None) -> None:
    with started(workplace, "recipe.yaml", "--out", "twice") as process:
        when(process, lambda: steps(workplace / "twice") >= 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode in (75, 130), f"75: the step was over between the two\n{errors}"
    assert "Traceback" not in errors
    resume(workplace, "twice")
    assert_as_undisturbed(workplace, "twice")


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_asked_to_stop_before_the_first_step(workplace: Path, seconds: float, real_interpreters: None) -> None:
    """At any time from the run's first trace on: while torch is loaded, data are read, the model is built."""
    name = f"before-{seconds:g}"
    with started(workplace, "recipe.yaml", "--out", name) as process:
        when(process, lambda: (workplace / name / ".lock").exists())
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors
    if (workplace / name / "recipe.yaml").exists():
        assert process.returncode == 75, errors
        resume(workplace, name)
    else:
        assert process.returncode in (75, -signal.SIGTERM), errors
        assert process.returncode != 75 or "no step was made" in errors
        with started(workplace, "recipe.yaml", "--out", name) as again:
            again.communicate(timeout=100)
        assert again.returncode == 0
    assert_as_undisturbed(workplace, name)


def test_a_second_process_in_the_folder_is_refused(workplace: Path) -> None:
    with started(workplace, "recipe.yaml", "--out", "shared") as first:
        when(first, lambda: (workplace / "shared" / ".lock").exists())
        with started(workplace, "recipe.yaml", "--out", "shared") as second:
            _, errors = second.communicate(timeout=60)
        assert first.poll() is None, "the first had ended: this test saw nothing"
        assert second.returncode == 2
        assert f"in use by another run\n  why: process {first.pid}" in errors
        first.communicate(timeout=100)
    assert first.returncode == 0
    assert_as_undisturbed(workplace, "shared")


def test_killed_at_random_times_until_it_is_done(workplace: Path) -> None:
    """SIGKILL in the middle of anything: accumulation, evaluation, a save, the end."""
    script = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLER, str(workplace / "killed"), "1"],
        cwd=workplace,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(workplace / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=350,
    )
    assert script.returncode == 0, script.stderr
    told = json.loads(script.stdout.splitlines()[-1])
    assert told["kills"] - told["early"] >= 4, f"hardly a kill fell into the run: {told}"
    assert_as_undisturbed(workplace, "killed")
