"""Which ranks are started: every mistake is found before any process is, with the command that works."""

from __future__ import annotations

import os

import pytest

from paceline.contract.errors import UserError
from paceline.machine.cluster import LAUNCHER, Place, find_place
from paceline.machine.facts import Facts, Gpu
from paceline.verbs.launch import Ranks, choose_ranks, parse_gpus
from paceline.verbs.launch.command import rank_command, without_launch

COMMAND = "paceline train r.yaml"
BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}


def machine(num_gpus: int, cuda: str | None = "13.0", uuids: bool = False) -> Facts:
    gpus = tuple(
        Gpu(name="NVIDIA H200", driver="580.1", uuid=f"GPU-{index}" if uuids else None) for index in range(num_gpus)
    )
    return Facts(
        python="3.11",
        platform="Linux",
        cpu_model=None,
        cpu_count=10,
        memory_bytes=None,
        gpus=gpus,
        versions={"torch": "2.13"},
        torch_cuda=cuda,
    )


@pytest.mark.parametrize(
    ("asked", "environment", "ranks"),
    [
        ({"gpus": 4}, {}, Ranks(count=4, threads=2)),
        ({"gpus": 1}, {}, Ranks(count=1, threads=10)),
        ({"gpus": "all"}, {}, Ranks(count=4, threads=2)),
        ({"processes": 3}, {}, Ranks(count=3, gpus="", threads=3)),
        ({"processes": 64}, {}, Ranks(count=64, gpus="", threads=1)),
        ({"devices": "1,3"}, {}, Ranks(count=2, gpus="1,3", threads=5)),
        ({"devices": " 3, 1 "}, {}, Ranks(count=2, gpus="3,1", threads=5)),
        ({"devices": "2"}, {}, Ranks(count=1, gpus="2", threads=10)),
        # numbers count what is visible
        ({"devices": "0,3"}, {"CUDA_VISIBLE_DEVICES": "4,5, 6,7"}, Ranks(count=2, gpus="4,7", threads=5)),
        # what clusters leave lying about does not matter
        ({"gpus": 2}, {"WORLD_SIZE": "1", "MASTER_ADDR": "x"}, Ranks(count=2, threads=5)),
        ({"gpus": 2}, {**BY_HAND, "WORLD_SIZE": "1"}, Ranks(count=2, threads=5)),
    ],
    ids=str,
)
def test_what_is_asked_for(asked: dict[str, str | int], environment: dict[str, str], ranks: Ranks) -> None:
    assert choose_ranks(COMMAND, lambda: machine(4), environment, **asked) == ranks  # type: ignore[arg-type]


def test_gpus_go_by_the_name_that_no_two_programs_count_differently() -> None:
    found = choose_ranks(COMMAND, lambda: machine(4, uuids=True), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, devices="0,3")
    assert found.gpus == "GPU-0,GPU-3"


@pytest.mark.parametrize(
    ("num_gpus", "asked", "environment", "parts"),
    [
        (2, {"gpus": 4}, {}, ("--gpus 4: more processes than GPUs", "2 GPUs in this", f"{COMMAND} --gpus 2")),
        (1, {"gpus": 2}, {"CUDA_VISIBLE_DEVICES": "3"}, ("1 GPU visible here (CUDA_VISIBLE_DEVICES=3)", "--gpus 1")),
        (0, {"gpus": 4}, {}, ("--gpus 4\n", "no NVIDIA GPU is visible", f"{COMMAND} --processes 4 trains on the CPU")),
        (
            0,
            {"gpus": "all"},
            {},
            ("--gpus all\n", "no NVIDIA GPU is visible", f"{COMMAND} --processes 2 trains on the"),
        ),
        (4, {"gpus": "all", "device": "cpu"}, {}, ("cpu with --gpus all", f"{COMMAND} --gpus all --set device=cuda")),
        (0, {"devices": "1,3"}, {}, ("--devices 1,3\n", "no NVIDIA GPU", f"{COMMAND} --processes 2")),
        (2, {"devices": "1,2,7"}, {}, ("--devices 1,2,7: no GPU 2 and no GPU 7", "from 0", "--devices 0,1")),
        (4, {"devices": "1,3,1"}, {}, ("--devices 1,3,1: GPU 1 twice", f"{COMMAND} --devices 1,3")),
        (4, {"devices": ""}, {}, ("--devices ''", "numbers from 0", "--devices 0,1,2,3")),
        (4, {"devices": "1,,3"}, {}, ("--devices 1,,3", "numbers from 0")),
        (4, {"devices": "1-3"}, {}, ("--devices 1-3", "numbers from 0")),
        (4, {"devices": "-1"}, {}, ("--devices -1", "numbers from 0")),
        (4, {"devices": "9" * 5000}, {}, ("numbers from 0",)),
        (4, {"gpus": 2, "processes": 2}, {}, ("--gpus 2 with --processes 2", f"{COMMAND} --gpus 2 or ")),
        (4, {"gpus": 2, "devices": "1,3"}, {}, ("--gpus 2 with --devices 1,3", "lists GPUs", f"{COMMAND} --devices")),
        (4, {"gpus": 2, "device": "cpu"}, {}, ("device = cpu with --gpus 2", f"{COMMAND} --processes 2")),
        (4, {"gpus": 2, "device": "cpu"}, {}, (f"{COMMAND} --gpus 2 --set device=cuda, or ",)),
        (4, {"devices": "1,2,3", "device": "cpu"}, {}, ("device = cpu with", f"{COMMAND} --processes 3")),
        (4, {"processes": 2, "device": "cuda"}, {}, ("device = cuda with --processes 2", f"{COMMAND} --gpus 2, or ")),
        (4, {"gpus": 2}, BY_HAND, ("--gpus 2: this process is a rank already", "by hand", "RANK=0", "or unset MASTER")),
        (4, {"gpus": 2}, {**BY_HAND, "TORCHELASTIC_RUN_ID": "x"}, ("already", "started by torchrun")),
        (4, {"gpus": 2}, {**BY_HAND, LAUNCHER: "9"}, ("already", "by paceline's launcher")),
        (4, {"gpus": 2}, {**BY_HAND, LAUNCHER: "9", "WORLD_SIZE": "1"}, ("already", "by paceline's launcher")),
        (4, {"gpus": 2}, {"RANK": "1", "WORLD_SIZE": "2"}, ("no MASTER_ADDR", "unset RANK WORLD_SIZE")),
    ],
)
def test_mistakes_are_found_with_the_command_that_works(
    num_gpus: int, asked: dict[str, str | int], environment: dict[str, str], parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        choose_ranks(COMMAND, lambda: machine(num_gpus), environment, **asked)  # type: ignore[arg-type]
    assert refused.value.fix
    for part in parts:
        assert part in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("text", "gpus"), [("4", 4), (" 04 ", 4), (2, 2), ("all", "all"), ("ALL", "all"), ("auto", "all"), ("-1", "all")]
)
def test_gpus_are_a_number_or_all(text: str | int, gpus: int | str) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("two", "--gpus 2, or --gpus all"),
        ("", "--gpus 2, or --gpus all"),
        ("-2", "--gpus 2, or --gpus all"),
        ("1.5", "--gpus 2, or --gpus all"),
        ("٢", "--gpus 2, or --gpus all"),
        (True, "--gpus 2, or --gpus all"),
        ("9" * 5000, "--gpus 2, or --gpus all"),
        ("0", "--gpus 2, or --gpus all; or leave it out: --set device=cpu trains on the CPU"),
        ("[1]", "--devices 1 names GPUs, --gpus 1 counts them"),
        ([0, 1], "--devices 0,1 names GPUs, --gpus 2 counts them"),
        ("0,3", "--devices 0,3 names GPUs, --gpus 2 counts them"),
    ],
)
def test_what_counts_no_gpus_is_refused(text: object, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_gpus(text)
    assert refused.value.fix.startswith(fix)


NODE = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,other",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
"""What the second of two tasks finds, one a node."""


def test_one_task_a_node_starts_the_ranks_of_its_node() -> None:
    found = choose_ranks(COMMAND, lambda: machine(4), NODE, gpus=4)
    assert (found.count, found.first, found.total) == (4, 4, 8)
    variables = found.environment(NODE, 3, 0)
    assert find_place(variables) == Place(
        rank=7, world_size=8, local_rank=3, local_world_size=4, started="paceline", init_method="env://"
    )
    assert variables["MASTER_ADDR"] == "localhost"
    first = choose_ranks(COMMAND, lambda: machine(4), {**NODE, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, gpus=4)
    assert (first.first, first.meet_at) == (0, found.meet_at), "the machines would not meet"


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        (
            {**NODE, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"},
            ("--gpus 4 with 2 processes of srun", f"srun {COMMAND} takes", f"--ntasks-per-node=1 {COMMAND} --gpus 4"),
        ),
        # the second node has one, and the first has two
        ({**NODE, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, ("with 3 processes of srun",)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ("with 4 processes of mpirun", "--map-by ppr:1:node"),
        ),
    ],
)
def test_tasks_that_are_ranks_start_none(environment: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        choose_ranks(COMMAND, lambda: machine(4), environment, gpus=4)
    for part in parts:
        assert part in str(refused.value), refused.value


def test_contradictions_are_told_without_asking_the_driver() -> None:
    def facts() -> Facts:
        raise AssertionError("the driver's tool takes a second")

    for asked in ({"gpus": 2, "processes": 2}, {"processes": 2, "device": "cuda"}, {"gpus": 2, "device": "cpu"}):
        with pytest.raises(UserError):
            choose_ranks(COMMAND, facts, {}, **asked)  # type: ignore[arg-type]


def test_the_variables_of_a_rank_give_its_place() -> None:
    outer = {"OMP_NUM_THREADS": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "5"}
    found = Ranks(count=3, threads=2).environment(outer, 1, 4321)
    assert find_place(found) == Place(
        rank=1, world_size=3, local_rank=1, local_world_size=3, started="paceline", init_method="env://"
    )
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found[LAUNCHER]) == ("127.0.0.1", "4321", str(os.getpid()))
    assert (found["HOME"], found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("/h", "7", "5")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    assert Ranks(count=3, threads=2, gpus="").environment({}, 1, 4321)["OMP_NUM_THREADS"] == "2"
    assert Ranks(count=3, gpus="").environment(outer, 0, 4321)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["train", "r.yaml", "--gpus", "4"], ["train", "r.yaml"]),
        (["train", "--gpus=4", "r.yaml", "--set", "a=1"], ["train", "r.yaml", "--set", "a=1"]),
        (["train", "--devices", "1,3", "r.yaml", "--timeout", "9"], ["train", "r.yaml", "--timeout", "9"]),
        (["train", "r.yaml", "--processes=2", "--set", "x=--gpus"], ["train", "r.yaml", "--set", "x=--gpus"]),
        (["train", "r.yaml", "--gpus"], ["train", "r.yaml"]),
    ],
)
def test_ranks_run_the_same_command_without_what_starts_ranks(arguments: list[str], kept: list[str]) -> None:
    assert without_launch(arguments) == kept


@pytest.mark.parametrize(
    ("original", "program"),
    [
        (["python", "/bin/paceline", "train", "r.yaml", "--gpus", "2"], ["/bin/paceline"]),
        (["python", "-X", "dev", "-m", "paceline", "train", "r.yaml", "--gpus", "2"], None),
        # called from another program, as from a test
        (["python", "-m", "pytest", "tests"], ["-P", "-m", "paceline"]),
        (["python"], ["-P", "-m", "paceline"]),
    ],
)
def test_the_command_line_is_this_processs_own(
    original: list[str], program: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/venv/python")
    monkeypatch.setattr("sys.orig_argv", original)
    monkeypatch.setattr("sys.argv", ["paceline", "train", "r.yaml", "--gpus", "2"])
    program = program or ["-X", "dev", "-m", "paceline"]
    assert rank_command() == ["/venv/python", *program, "train", "r.yaml"]
