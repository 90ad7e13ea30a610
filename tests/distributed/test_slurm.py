"""Jobs of a real Slurm of two nodes, cut off in every way that a cluster has: they end with the undisturbed bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from paceline.run.checkpoint.store import CheckpointStore
from tests.distributed.slurm_cluster import Cluster, cluster, missing
from tests.e2e.whole_runs import lines, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

STEPS = 80

LOSS = """
import time
from pathlib import Path
from torch.nn.functional import cross_entropy

def loss(logits, labels):
    if Path("slow").exists():
        time.sleep(0.5)
    return cross_entropy(logits, labels, reduction="none")
"""
"""Steps that take half a second, until there was time for all that is to happen."""

PATIENCE = 240.0
"""Seconds in which a start loads everything on a machine that does other things too, and makes a step."""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of each test alone: one of them sets a node down."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe.yaml, and the undisturbed run of two ranks in it."""
    place = tmp_path_factory.mktemp("shared")
    (place / "gated_loss.py").write_text(LOSS)
    rows = [f"film {row}:{' it was long' * (row % 7)},{('good', 'bad')[row % 2]}" for row in range(60)]
    (place / "reviews.csv").write_text("\n".join(["text,label", *rows, ""]))
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    chosen = recipe(
        write_tiny_model(place / "model", tiny_bert_config(**dropout)),
        place / "reviews.csv",
        loop={"epochs": 30, "max_steps": STEPS, "checkpoint_every": 1, "micro_batch_size": None},
        observe={"console": "plain", "log_every": 1},
    )
    plain = {**chosen.plain(), "name": "tiny", "task": {"loss": "gated_loss:loss"}}
    (place / "recipe.yaml").write_text(yaml.safe_dump(plain))
    command(place, "train", "recipe.yaml", "--processes", "2", "--out", "undisturbed")
    return place


def command(place: Path, *arguments: str, slurm: Cluster | None = None) -> str:
    """A command of paceline's, which succeeds; its output."""
    environment = {**(slurm.environment if slurm else os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=place,
        env={**environment, "PACELINE_CACHE": str(place / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Job:
    """A submitted run."""

    def __init__(self, slurm: Cluster, place: Path, name: str) -> None:
        self.slurm, self.run = slurm, place / name
        words = ("--nodes", "2", "--processes", "1", "--time", "20m", "--out", name)
        out = command(place, "launch", "slurm", "recipe.yaml", *words, slurm=slurm)
        self.number = next(line.split()[1].rstrip(":") for line in out.splitlines() if line.split()[0] == "job")
        self.log = place / f"{name}.slurm" / f"{self.number}.log"

    def steps(self) -> int:
        """That are in the metrics, of all starts."""
        return len(lines(self.run, "step")) if (self.run / "metrics.jsonl").exists() else 0

    def said(self) -> str:
        """The log of all starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else "nothing"

    def goes_on(self, start: int) -> None:
        """Wait for some steps of a start, so that what comes next comes in the middle of it."""
        said = f"start {start} of job {self.number}"
        self.slurm.wait(f"{said}: {self.said()}", lambda: said in self.said(), PATIENCE)
        before = self.steps()
        self.slurm.wait(f"steps of {said}: {self.said()}", lambda: self.steps() >= before + 3, PATIENCE)

    def is_queued_again(self, *changes: str) -> None:
        """Wait until it is, and have it start now: Slurm itself lets two minutes pass."""
        self.slurm.wait(f"queued again: {self.said()}", lambda: self.slurm.state(self.number) == "PENDING", PATIENCE)
        # the nodes tell a start's credential from the revoked one before it by the second
        time.sleep(3)
        self.slurm.told("scontrol", "update", f"jobid={self.number}", "StartTime=now", *changes)


def preempt(job: Job) -> None:
    """As an administrator does it, and a job of higher priority."""
    job.slurm.told("scontrol", "requeue", job.number)
    job.is_queued_again()
    assert "stopped by SIGTERM after step" in (job.run / "preempted").read_text()


def run_out_of_time(job: Job) -> None:
    """The limit becomes so short that the warning is due."""
    elapsed = job.slurm.told("squeue", "-h", "-j", job.number, "-o", "%M").strip()
    job.slurm.told("scontrol", "update", f"jobid={job.number}", f"TimeLimit={int(elapsed.split(':')[-2]) + 2}")
    job.is_queued_again("TimeLimit=20")
    assert "stopped by SIGUSR2 after step" in (job.run / "preempted").read_text()
    assert "queued again" in job.said()


def lose_a_node(job: Job) -> None:
    """The second node goes down at once, and comes back for the next start."""
    job.slurm.lose_node("n2")
    job.slurm.told("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    job.slurm.wait("queued again", lambda: job.slurm.state(job.number) == "PENDING", PATIENCE)
    assert not (job.run / "summary.json").exists()
    job.slurm.start_node("n2")
    job.slurm.told("scontrol", "update", "nodename=n2", "state=resume")
    job.is_queued_again()


OFTEN = [preempt, run_out_of_time]


@pytest.mark.parametrize(
    ("name", "troubles"), [("cut-off", OFTEN), ("cut-off-once-more", OFTEN), ("a-node-lost", [lose_a_node])]
)
def test_a_job_that_is_cut_off_ends_with_the_bits_of_the_undisturbed_run(
    slurm: Cluster, workplace: Path, name: str, troubles: Sequence[Callable[[Job], None]]
) -> None:
    (workplace / "slow").touch()
    job = Job(slurm, workplace, name)
    for start, trouble in enumerate(troubles, 1):
        job.goes_on(start)
        trouble(job)
    job.goes_on(len(troubles) + 1)
    (workplace / "slow").unlink()
    slurm.wait(f"the end: {job.said()}", lambda: not slurm.state(job.number), PATIENCE)

    said = job.said()
    assert f"the run is finished: {job.run}" in said
    starts = [line for line in said.splitlines() if re.search(r"\] start \d+ of job", line)]
    assert len(starts) == len(troubles) + 1, "another number of starts"
    assert "Traceback" not in said
    assert not (job.run / "preempted").exists()
    newest, expected = (
        CheckpointStore(folder / "checkpoints", 1).newest() for folder in (job.run, workplace / "undisturbed")
    )
    assert newest.step == expected.step == STEPS
    for stem in ("model", "optimizer"):
        found, wanted = newest.tensors(stem), expected.tensors(stem)
        assert found.keys() == wanted.keys()
        other = [key for key in wanted if not torch.equal(found[key], wanted[key])]
        assert not other, f"{len(other)} tensors of {stem} differ, such as {other[:3]}"
    model = "model/model.safetensors"
    assert (job.run / model).read_bytes() == (workplace / "undisturbed" / model).read_bytes()
    assert lines(job.run, "step") == lines(workplace / "undisturbed", "step")
