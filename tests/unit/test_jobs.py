"""What srun, mpirun and horovodrun say of a process, and the place that follows."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import UserError
from paceline.machine import jobs
from paceline.machine.cluster import Place, check_gpus, find_place, rank_in
from paceline.machine.facts import Facts
from paceline.machine.jobs import FIRST_PORT, NUM_PORTS, Member, member, node_address
from paceline.verbs.cli import main
from paceline.verbs.commands.ranks import alone_in_a_job
from paceline.verbs.doctor import joins, shown

OUTSIDE = Facts(python="3.11", platform="Linux", cpu_model=None, cpu_count=2, memory_bytes=None)
FACTS = replace(OUTSIDE, in_slurm=True)

BATCH = {
    "SLURM_JOB_ID": "70",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
}
"""What a batch script finds: the allocation, and the numbers of the first task, which it is not."""


def task(number: int, *, nodes: str = "gpu[07-08]", per_node: str = "2(x2)", local: int = 2) -> dict[str, str]:
    """What a task of four finds."""
    return {
        **BATCH,
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % local),
        "SLURM_NODEID": str(number // local),
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.5",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234",
}
PORT = FIRST_PORT + 70 * 16 + 2


def test_tasks_of_a_step_are_ranks_that_meet_on_the_first_node() -> None:
    for number in range(4):
        assert find_place(task(number)) == Place(
            rank=number,
            world_size=4,
            local_rank=number % 2,
            local_world_size=2,
            started="srun",
            init_method=f"tcp://gpu07:{PORT}",
        )


def test_tasks_of_one_node_meet_on_loopback() -> None:
    place = find_place(task(3, nodes="gpu07", per_node="4", local=4))
    assert (place.local_rank, place.local_world_size) == (3, 4)
    assert place.init_method == f"tcp://127.0.0.1:{PORT}"


def test_where_a_script_says_where_to_meet_they_meet_there() -> None:
    there = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    assert find_place({**task(1), **there}).init_method == "tcp://head:29500"
    assert find_place({**task(1), "MASTER_ADDR": "fe80::1"}).init_method == f"tcp://[fe80::1]:{PORT}"


@pytest.mark.parametrize(
    "environment",
    [
        BATCH,
        {name: text for name, text in BATCH.items() if name not in ("SLURM_PROCID", "SLURM_LOCALID")},
        {**task(0), "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0"},
        {"HOROVOD_RANK": "1"},
    ],
    ids=["batch script", "salloc", "one task", "mpirun -n 1", "PMI_RANK alone", "HOROVOD_RANK alone"],
)
def test_what_was_started_by_itself_is_alone(environment: dict[str, str]) -> None:
    assert find_place(environment) == Place()


def test_mpirun_says_no_machine_so_it_is_asked_for() -> None:
    with pytest.raises(UserError, match="no MASTER_ADDR") as refused:
        find_place(OMPI)
    assert "mpirun -x" in refused.value.fix
    place = find_place({**OMPI, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert place == Place(
        rank=3, world_size=4, local_rank=1, local_world_size=2, started="mpirun", init_method="tcp://node1:29500"
    )


@pytest.mark.parametrize("kind", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD"])
def test_mpirun_on_one_machine_needs_nothing(kind: str) -> None:
    names = {f"{kind}_RANK": "1", f"{kind}_SIZE": "2", f"{kind}_LOCAL_RANK": "1", f"{kind}_LOCAL_SIZE": "2"}
    place = find_place(names)
    assert (place.rank, place.local_rank, place.started) == (1, 1, "mpirun")
    assert (place.init_method or "").startswith("tcp://127.0.0.1:")
    # two runs of one machine do not meet each other
    other = find_place({**names, "PMIX_NAMESPACE": "prterun-host-7@1"})
    assert other.init_method != place.init_method


def test_what_starts_inside_a_slurm_job_numbers_its_own() -> None:
    # mpirun's and hydra's helpers are tasks of a step, one a node
    helper = {**task(1), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert find_place({**helper, **OMPI}).rank == 3
    assert find_place({**helper, **OMPI}).init_method == f"tcp://gpu07:{FIRST_PORT + 70 * 16}"
    assert find_place({**helper, "PMI_RANK": "2", "PMI_SIZE": "4"}).is_local_guessed
    torchrun = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert find_place({**helper, **torchrun, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}).started == "torchrun"


def test_a_task_whose_srun_speaks_pmi_too_is_a_task() -> None:
    """``srun --mpi=pmi2``, on many clusters the default, numbers the same task twice."""
    for number in range(4):
        found = {**task(number), "SLURM_GPUS_PER_TASK": "1"}
        assert find_place({**found, "PMI_RANK": str(number), "PMI_SIZE": "4"}) == find_place(found)
    one_a_node = {**task(1, per_node="1(x2)", local=1), "SLURM_STEP_NUM_TASKS": "2"}
    found_member = member({**one_a_node, "PMI_RANK": "1", "PMI_SIZE": "2"})
    assert found_member is not None
    assert found_member.is_one_a_machine


def test_horovodrun_meets_where_it_was_started() -> None:
    place = find_place(HOROVOD)
    assert (place.rank, place.world_size, place.local_rank, place.started) == (1, 4, 1, "horovodrun")
    assert (place.init_method or "").startswith("tcp://10.0.0.5:")
    assert not (place.init_method or "").endswith(":41234"), "horovodrun itself listens there"


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({**task(1), "RANK": "2"}, ("RANK='2'", "SLURM_PROCID=1", "unset RANK, or RANK=1")),
        ({**task(1), "WORLD_SIZE": "1"}, ("WORLD_SIZE='1'", "unset WORLD_SIZE, or WORLD_SIZE=4")),
        (
            {**task(1), "MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"},
            ("each of 4 processes", "several runs", "unset MASTER_ADDR"),
        ),
        ({**task(1), "MASTER_PORT": "x"}, ("MASTER_PORT='x'", "29500")),
        ({**task(1), "SLURM_PROCID": ""}, ("no SLURM_PROCID", "hand on all variables")),
        ({**task(1), "SLURM_PROCID": "4"}, ("SLURM_PROCID=4", "count from 0")),
        ({**task(1), "SLURM_PROCID": "one"}, ("SLURM_PROCID='one'", "whole number")),
        ({**task(1), "SLURM_STEP_NODELIST": "n[1-"}, ("SLURM_STEP_NODELIST=", "MASTER_ADDR")),
        ({**task(1), "SLURM_STEP_TASKS_PER_NODE": "2(x"}, ("SLURM_STEP_TASKS_PER_NODE=",)),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, ("OMPI_COMM_WORLD_RANK=4", "count from 0")),
    ],
)
def test_contradictions_are_refused(environment: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        find_place(environment)
    assert refused.value.fix
    for part in parts:
        assert part in str(refused.value), refused.value


def test_options_for_a_run_each_are_refused_too() -> None:
    with pytest.raises(UserError, match="several runs"):
        find_place(task(1), init="tcp://127.0.0.1:1", rank=0, world_size=1)
    assert find_place(task(1), init="tcp://127.0.0.1:1", rank=1, world_size=4).rank == 1


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, None),
        ({"SLURM_GPUS_PER_TASK": "1"}, 1),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, 1),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:a100:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:a100=1,cpu=16"}, 1),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, None),
        ({"SLURM_GPU_BIND": "single:1"}, 1),
        ({"SLURM_GPU_BIND": "verbose,per_task:1"}, 1),
        ({"SLURM_GPU_BIND": "map_gpu:0,1"}, 1),
        ({"SLURM_GPU_BIND": "none", "SLURM_GPUS_PER_TASK": "1"}, None),
        ({"SLURM_GPU_BIND": "closest"}, None),
    ],
    ids=str,
)
def test_gpus_of_a_task_are_counted_from_0(variables: Mapping[str, str], own: int | None) -> None:
    place = find_place({**task(1), **variables})
    assert (place.own_gpus, place.gpu) == (own, 1 if own is None else 0)


def test_gpus_that_do_not_suffice_are_told_with_the_line_that_works() -> None:
    place = find_place(task(1))
    check_gpus(place, 2)
    with pytest.raises(UserError) as refused:
        check_gpus(place, 1)
    assert "srun --ntasks-per-node=1" in refused.value.fix
    check_gpus(find_place({**task(1), "SLURM_GPUS_PER_TASK": "1"}), 1)
    with pytest.raises(UserError, match="stand idle"):
        check_gpus(find_place({**task(1), "SLURM_GPUS_PER_TASK": "2"}), 2)


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = {
        (member({**task(0), "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) or Member).port  # type: ignore[attr-defined]
        for job in range(5000, 5100)
        for step in range(4)
    }
    assert len(ports) == 400
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + NUM_PORTS < 32768, "Linux hands out ports from 32768"


def test_who_asks_whether_to_speak_is_answered() -> None:
    assert [rank_in(task(number)) for number in range(4)] == [0, 1, 2, 3]
    assert rank_in({**task(1), "WORLD_SIZE": "9"}) == 0
    assert rank_in({}) == 0


TYPED = """
import json, os, sys
sys.path[:0] = {path!r}
from paceline.machine.jobs import member
environment = {environment!r}
environment["SLURM_TASK_PID"] = sys.argv[1]
print("count", getattr(member(environment), "count", None))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("command", "on_terminal", "expected"),
    [
        (["sh", "-i"], True, "count None"),
        (["sh"], False, "count 4"),
        (["sh", "-c", "{line}; true"], True, "count 4"),
    ],
    ids=["srun --pty sh", "srun sh < script", "srun --pty sh -c"],
)
def test_a_shell_that_is_typed_into_is_one_process(
    tmp_path: Path, command: list[str], on_terminal: bool, expected: str
) -> None:
    program = tmp_path / "asks.py"
    program.write_text(TYPED.format(path=sys.path, environment=task(0)))
    line = f"{sys.executable} {program} $$"
    words = [word.format(line=line) for word in command]
    assert expected in (_on_terminal if on_terminal else _through_pipe)(words, f"{line}; exit\n")


def _on_terminal(words: list[str], typed: str) -> str:
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(words[0], words)
    os.write(terminal, typed.encode())
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # how Linux says that the other end has closed
        pass
    os.waitpid(child, 0)
    os.close(terminal)
    return shown.decode()


def _through_pipe(words: list[str], typed: str) -> str:
    import subprocess

    return subprocess.run(words, input=typed, capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.mark.parametrize(
    ("step", "expected"), [("[71.batch]", None), ("[70.interactive]", None), ("[70.2]", 4)], ids=str
)
def test_variables_that_a_job_inherited_from_another_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, expected: int | None
) -> None:
    files = {
        "/proc/900/cmdline": "/bin/bash\0/var/spool/slurmd/job71/slurm_script\0",
        "/proc/900/stat": "900 (slurm (x) script) S 899 900 900 0 -1",
        "/proc/899/cmdline": f"slurmstepd: {step}\0",
    }

    def opened(path: str) -> Any:
        file = tmp_path / path.strip("/").replace("/", "-")
        file.write_text(files[path])
        return file

    monkeypatch.setattr(jobs, "Path", lambda path: opened(path) if path in files else Path(path))
    assert getattr(member({**task(0), "SLURM_TASK_PID": "900"}), "count", None) == expected


def test_a_node_without_a_name_of_its_own_is_asked_of_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=vm\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert node_address("no-such-node.invalid") == "10.1.2.3"
    assert node_address("localhost") == "localhost"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert node_address("no-such-node.invalid") == "no-such-node.invalid"


@pytest.mark.parametrize("command", ["predict", "lr"])
def test_what_one_process_carries_out_is_not_done_by_each(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in task(1).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "argv", ["paceline", command, "r.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"fix: srun --ntasks=1 paceline {command}" in capsys.readouterr().err


def test_a_run_that_leaves_tasks_idle_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(environment: Mapping[str, str]) -> str:
        with monkeypatch.context() as patch:
            for name, text in environment.items():
                patch.setenv(name, text)
            assert alone_in_a_job() == {}
        return capsys.readouterr().err

    assert "this Slurm job has 4 tasks, and this is one process: srun paceline train" in said(BATCH)
    numbered = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "4"}
    one_task = {**task(0), "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for environment in ({}, {**BATCH, "SLURM_NTASKS": "1"}, {**BATCH, **numbered}, task(1), one_task):
        assert said(environment) == "", environment


def test_doctor_tells_how_a_process_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(environment: Mapping[str, str]) -> list[str]:
        with monkeypatch.context() as patch:
            for name, text in environment.items():
                patch.setenv(name, text)
            return [shown([finding]) for finding in joins(FACTS if "SLURM_JOB_ID" in environment else OUTSIDE)]

    assert told({}) == []
    assert "- cluster  inside Slurm job 70: a run started here is one process of 4" in told(BATCH)[0]
    assert "fix: srun paceline train" in told(BATCH)[0]
    assert "one process\n" in told({**BATCH, "SLURM_NTASKS": "1"})[0]
    assert f"inside Slurm job 70: rank 1 of 4, by srun, meeting at gpu07:{PORT}" in told(task(1))[0]
    (refused,) = told({**task(1), "WORLD_SIZE": "8"})
    assert refused.startswith("! cluster")
    assert "fix: unset WORLD_SIZE" in refused
