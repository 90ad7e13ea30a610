"""Runs whose processes a job started: the variables of srun, mpirun and horovodrun alone, as a cluster sets them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from paceline.machine.jobs import FIRST_PORT, NUM_PORTS
from paceline.recipe import Recipe
from paceline.verbs.train import train
from tests.testing.distributed import run_processes
from tests.testing.ports import free_port
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("forked_interpreters")

SLOW = pytest.mark.slow

OTHERS = ("mpirun", "pmi", "horovodrun")

ALONE = ("SLURM_", "OMPI_", "PMI_", "HOROVOD_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
"""What the machine of the test may say of itself."""


def recipe(place: Path) -> Recipe:
    """Four steps of a tiny model with dropout."""
    (place / "reviews.csv").write_text(
        "text,label\n"
        + "".join(f"film {row}{' was long' * (row % 5)},{('good', 'bad')[row % 2]}\n" for row in range(40))
    )
    model = write_tiny_model(place / "model", tiny_bert_config(hidden_dropout_prob=0.1))
    return Recipe.parse(
        {
            "model": {"source": str(model)},
            "data": {"source": str(place / "reviews.csv"), "splits": {"validation": 0.2, "test": 0.2}},
            "optimizer": {"lr": 1e-2},
            "loop": {"max_steps": 4, "batch_size": 8, "save_best": False},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def variables(kind: str, rank: int, size: int) -> dict[str, str]:
    """What a process of this number is told; the port of a job is one that is free here."""
    port = free_port()
    if kind == "srun":
        # two tasks a node, on two nodes of which both are this machine
        local = min(size, 2)
        return {
            "SLURM_JOB_ID": str(port),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % local),
            "SLURM_NODEID": str(rank // local),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_NODELIST": "localhost" if size == local else "localhost,localhost2",
            "SLURM_STEP_TASKS_PER_NODE": str(local) + f"(x{size // local})" * (size > local),
        }
    names = {"mpirun": "OMPI_COMM_WORLD", "pmi": "PMI", "horovodrun": "HOROVOD"}
    locals_ = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if kind == "pmi" else ("LOCAL_RANK", "LOCAL_SIZE")
    prefix = "" if kind == "pmi" else f"{names[kind]}_"
    job = {"PMI_JOBID": str(port), "PMIX_NAMESPACE": str(port), "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    return {
        f"{names[kind]}_RANK": str(rank),
        f"{names[kind]}_SIZE": str(size),
        f"{prefix}{locals_[0]}": str(rank),
        f"{prefix}{locals_[1]}": str(size),
        **job,
    }


def processes(kind: str, size: int) -> list[dict[str, str]]:
    """The variables of all processes of one job, which differ in what numbers them."""
    first = variables(kind, 0, size)
    fixed = {name: first[name] for name in first if name.endswith(("JOB_ID", "JOBID", "NAMESPACE", "PORT"))}
    return [{**variables(kind, rank, size), **fixed} for rank in range(size)]


def one_of(rank: int, told: Sequence[Mapping[str, str]], plain: dict[str, object], out: Path) -> str | None:
    """In a process of its own."""
    for name in [name for name in os.environ if name.startswith(ALONE)]:
        del os.environ[name]
    os.environ.update(told[rank])
    train(plain, out=out, timeout_seconds=40)
    return sha256((out / "model/model.safetensors").read_bytes()).hexdigest() if rank == 0 else None


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def expected(chosen: Recipe, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The digest of the weights of two ranks that were numbered by the variables of torch.distributed."""
    port = free_port()
    told = [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        for rank in range(2)
    ]
    out = tmp_path_factory.mktemp("numbered") / "run"
    found: list[str | None] = run_processes(one_of, 2, told, chosen.plain(), out, timeout_seconds=60)
    return found[0]


@pytest.mark.parametrize(
    "kind", ["srun", *(pytest.param(kind, marks=SLOW) for kind in ("mpirun", "pmi", "horovodrun"))]
)
def test_processes_of_a_job_are_one_run(kind: str, chosen: Recipe, expected: str | None, tmp_path: Path) -> None:
    found = run_processes(one_of, 2, processes(kind, 2), chosen.plain(), tmp_path / "run", timeout_seconds=60)
    assert found[0] == expected, "other bits than those of ranks that were numbered by hand"


TORCHRUN = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("size", [2, 4])
def test_tasks_of_srun_end_with_the_weights_of_torchrun(
    size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if size == 2:
        request.getfixturevalue("real_interpreters")
    chosen = recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    base = {name: text for name, text in os.environ.items() if not name.startswith(ALONE)}
    base |= {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(tmp_path / "cache")}
    command = ["-m", "paceline", "train", "recipe.yaml", "--out"]

    def ended(*arguments: str, told: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**base, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with ended(*TORCHRUN, str(size), *command, "torchrun", told={}) as agent:
        assert agent.wait(120) == 0, agent.stdout and agent.stdout.read()
    with ExitStack() as all_tasks:
        tasks = [all_tasks.enter_context(ended(*command, "srun", told=told)) for told in processes("srun", size)]
        codes = [task.wait(120) for task in tasks]
        assert codes == [0] * size, [task.stdout and task.stdout.read() for task in tasks]
    model = "model/model.safetensors"
    assert (tmp_path / "srun" / model).read_bytes() == (tmp_path / "torchrun" / model).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_one_task_a_node_starts_the_ranks_of_its_node(tmp_path: Path) -> None:
    """Two launchers of two ranks each, as on two nodes; and one of them says the same where it refuses."""
    chosen = recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    base = {name: text for name, text in os.environ.items() if not name.startswith(ALONE)}
    base |= {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(tmp_path / "cache")}
    nodes = processes("srun", 4)
    tasks = [
        {**nodes[0], "SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURM_NODEID": str(node),
         "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        for node in range(2)
    ]  # fmt: skip
    command = [sys.executable, "-m", "paceline", "train", "recipe.yaml", "--processes", "2", "--out"]
    with ExitStack() as both:
        started = [
            both.enter_context(
                subprocess.Popen(
                    [*command, "nodes"], cwd=tmp_path, env={**base, **told}, stderr=subprocess.STDOUT,
                    stdout=subprocess.PIPE, text=True,
                )
            )
            for told in tasks
        ]  # fmt: skip
        codes = [launcher.wait(120) for launcher in started]
        assert codes == [0, 0], [launcher.stdout and launcher.stdout.read() for launcher in started]
    four = [*TORCHRUN, "4", "-m", "paceline", "train", "recipe.yaml", "--out", "torchrun"]
    subprocess.run([sys.executable, *four], cwd=tmp_path, env=base, capture_output=True, timeout=120, check=True)
    model = "model/model.safetensors"
    assert (tmp_path / "nodes" / model).read_bytes() == (tmp_path / "torchrun" / model).read_bytes()
    refused = subprocess.run(
        [*command, "x"], cwd=tmp_path, env={**base, **nodes[1]}, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2, refused.stderr
    assert "--processes 2 with 4 processes of srun" in refused.stderr
    assert "srun --ntasks-per-node=1 paceline train recipe.yaml --out x --processes 2" in refused.stderr


def test_ports_stay_clear_of_those_of_other_tests() -> None:
    """``free_port`` has room for the ports that these tests derive."""
    assert FIRST_PORT + NUM_PORTS <= 32768
