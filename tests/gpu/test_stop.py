"""The command is asked to stop while it compiles, captures or replays for one GPU or two."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.test_deepspeed import ranks_of, steps_of
from tests.e2e.test_stop_in_every_phase import SECONDS, asked, await_file, finished, started, write_recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

ROWS = [f"film {number} is {'good' if number % 2 else 'bad'},{number % 2}" for number in range(80)]


def members(group: int) -> list[int]:
    """Processes of a group that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if os.getpgid(int(entry.name)) == group and state != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        ("paceline.engine.torch_engine.TorchEngine.warm_up_on", 0.0),
        ("paceline.engine.torch_engine.TorchEngine.warm_up_on", 1e9),
        ("paceline.engine.capture.Captured._capture", 1e9),
    ],
    ids=["compiling", "compiling hangs", "capturing hangs"],
)
def test_a_signal_to_all_of_the_group(where: str, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *ROWS, ""]))
    model = write_tiny_model(tmp_path / "model", tiny_bert_config())
    write_recipe(tmp_path, model, tmp_path / "texts.csv")
    words = ["recipe.yaml", "--out", "run", "--set", "device=cuda", "--set", "techniques.compile=true"]
    with started(tmp_path, *words, where=where, seconds=seconds) as process:
        await_file(process, tmp_path / "hangs")
        time.sleep(1)
        assert "so nothing is lost: start it again" in asked(process)
        deadline = time.monotonic() + 60
        while members(process.pid):
            assert time.monotonic() < deadline, "processes that compile outlive the run"
            time.sleep(0.1)


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ENDLESS = {"epochs": 100_000, "max_steps": 1_000_000, "batch_size": 8, "micro_batch_size": None}
LONG = {"loop": {**ENDLESS, "checkpoint_every": "never", "evaluate_every": "never", "save_best": False}}


@TWO
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whom", ["the group", "one rank"])
def test_a_signal_to_two_ranks_that_replay(whom: str, tmp_path: Path) -> None:
    """In the midst of captured steps, which hold the ranks' sums: all stop after the same one, and the run goes on."""
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *ROWS, ""]))
    write_recipe(tmp_path, write_tiny_model(tmp_path / "model", tiny_bert_config()), tmp_path / "texts.csv", **LONG)
    run, where = tmp_path / "run", ["--set", "device=cuda", "--set", "techniques.capture=true", "--gpus", "2"]
    with started(tmp_path, "recipe.yaml", "--out", "run", *where) as process:
        deadline = time.monotonic() + 120
        while steps_of(run) < 200:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no steps are made"
            time.sleep(0.05)
        began = time.monotonic()
        if whom == "the group":
            asked(process)
        else:
            os.kill(ranks_of(process.pid)[-1], signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 75, errors
        assert time.monotonic() - began < SECONDS
    told = (run / "preempted").read_text()
    assert ("to rank 1" in told) == (whom == "one rank"), told
    finished(tmp_path, "run", "--resume", "--gpus", "2", "--set", f"loop.max_steps={steps_of(run) + 5}")


@TWO
@pytest.mark.timeout(300)
def test_a_signal_to_two_ranks_that_compile(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *ROWS, ""]))
    write_recipe(tmp_path, write_tiny_model(tmp_path / "model", tiny_bert_config()), tmp_path / "texts.csv")
    words = ["recipe.yaml", "--out", "run", "--set", "device=cuda", "--set", "techniques.compile=true", "--gpus", "2"]
    where = "paceline.engine.torch_engine.TorchEngine.warm_up_on"
    with started(tmp_path, *words, where=where, seconds=0.0) as process:
        await_file(process, tmp_path / "hangs")
        time.sleep(1)
        assert "so nothing is lost: start it again" in asked(process)


@TWO
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_told_with_the_collectives_of_all(tmp_path: Path) -> None:
    """The other's GPU waits in NCCL, and its host in gloo: the host ends first, and the ranks are compared."""
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *ROWS, ""]))
    write_recipe(tmp_path, write_tiny_model(tmp_path / "model", tiny_bert_config()), tmp_path / "texts.csv", **LONG)
    words = ["recipe.yaml", "--out", "run", "--set", "device=cuda", "--set", "techniques.capture=false", "--gpus", "2"]
    with started(
        tmp_path, *words, "--timeout", "20", where="paceline.engine.step.Step.micro", call=9, rank="1"
    ) as process:
        await_file(process, tmp_path / "hangs")
        _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, 75), errors
    assert "paceline: rank 1 hung\n  where: called (" in errors, errors
    assert "rank 1 made none" in errors, errors
