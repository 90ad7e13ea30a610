"""What srun, mpirun and horovodrun tell each of the processes that they started together.

The lists in which Slurm writes nodes and counts are read without ``scontrol``, which containers often lack.
"""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.contract.errors import UserError, excerpt

_PARTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""What stands between two commas that are in no brackets."""

_NUMBERS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)

MOST_NODES = 65_536
"""More than any Slurm cluster has (its limit, MAX_SLURM_NODES)."""


def nodes(text: str, variable: str = "SLURM_JOB_NODELIST") -> list[str]:
    """The names in Slurm's short form of them: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login.

    The grammar is that of ``scontrol show hostnames``: brackets may stand anywhere and more than once, zeros in front
    are kept, and the last brackets count fastest.

    Args:
        variable: where the text was found; for the message.

    Raises:
        UserError: it is no such list.
    """
    if not text or ",".join(_PARTS.findall(text)) != text:
        raise _no_list(variable, text)
    found: list[str] = []
    for part in _PARTS.findall(text):
        # what is not in brackets has even places
        pieces = _NUMBERS.split(part)
        choices = [
            list(itertools.islice(_numbers(piece, variable, text), MOST_NODES)) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        found += itertools.islice(map("".join, itertools.product(*choices)), MOST_NODES)
    return found[:MOST_NODES]


def counts(text: str, variable: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """The numbers of tasks, node by node: ``4(x2),1`` is 4, 4, 1.

    Raises:
        UserError: it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"{variable}={excerpt(text)}", "Slurm writes counts as 4(x2),1", f"unset {variable}, or start with srun"
            )
        found += [int(match[1])] * min(int(match[2] or 1), MOST_NODES)
    return found


def _numbers(inside: str, variable: str, text: str) -> Iterator[str]:
    """``01-03,7`` -> 01, 02, 03, 7."""
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_list(variable, text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_list(variable, text)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def _no_list(variable: str, text: str) -> UserError:
    why = "Slurm writes nodes as node1 or gpu[01-03,7],login"
    return UserError(f"{variable}={excerpt(text)}", why, "start with srun, or set MASTER_ADDR to the first node")


FIRST_PORT, NUM_PORTS = 12_000, 20_000
"""Ports that a job meets at: below those that Linux hands out by itself (32768 and above), and those of daemons."""

JobStarter = Literal["srun", "mpirun", "horovodrun"]

ANSWER_SECONDS = 10.0
"""How long scontrol may take: a busy controller answers late."""

_SHELLS = frozenset({"ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"})

_MPI = (
    # Open MPI's mpirun (docs.open-mpi.org, environment variables set by mpirun)
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # MVAPICH2
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    # MPICH's and Intel MPI's hydra, and srun --mpi=pmi2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of several processes that were started together; the numbers are theirs, and not yet those of ranks."""

    by: JobStarter
    number: int
    """This process's, over all machines."""
    count: int
    """Processes, on all machines."""
    local_number: int | None = None
    local_count: int | None = None
    """The same of this machine; None where nobody says."""
    is_one_a_machine: bool = False
    """Whether each machine has one of them, as far as this one knows: it may start a rank for each GPU."""
    host: str | None = None
    """The machine of the first one; None where nobody says."""
    port: int
    """At which they may meet; the same for all, and another in another job."""
    own_gpus: int | None = None
    """GPUs that this process alone sees, as with ``--gpus-per-task``; None: all processes of a machine see the same."""
    variables: str
    """What said so, as it would be typed."""


def job_of(environment: Mapping[str, str]) -> str | None:
    """A name of the job that starts this process, again where it fails; None where nothing does.

    It is the same for all starts of the job. torchrun's own is ``none`` where its agents meet at a fixed address.
    """
    if run := environment.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun {run}"
    return f"slurm {job}" if (job := environment.get("SLURM_JOB_ID")) else None


def is_restart(environment: Mapping[str, str]) -> bool:
    """Whether the job has started this process before: ``torchrun --max-restarts``, or a job that was requeued."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def member(environment: Mapping[str, str]) -> Member | None:
    """What this process is among those that were started with it; None where it was started by itself.

    A batch script and a shell that somebody types into are by themselves, whatever their allocation holds. mpirun and
    horovodrun are asked before Slurm: inside a Slurm job they start their own helpers with srun.

    Raises:
        UserError: what is said cannot be read, or is not whole.
    """
    for names in _MPI:
        if found := _numbered("mpirun", environment, names):
            task = _of_slurm(environment) if found.local_number is None else None
            # srun --mpi=pmi2 numbers its tasks twice, and Slurm's variables say more
            return task if task and (task.number, task.count) == (found.number, found.count) else found
    return _numbered("horovodrun", environment, _HOROVOD) or _of_slurm(environment)


def _numbered(by: JobStarter, environment: Mapping[str, str], names: tuple[str, str, str, str]) -> Member | None:
    """A process with four variables of one kind; the two local ones may be missing."""
    given = {name: text for name in names if (text := environment.get(name, "").strip())}
    if names[0] not in given or names[1] not in given:
        return None
    number, count = (_number(name, given[name]) for name in names[:2])
    if number >= count:
        raise UserError(f"{_typed(given)}", f"processes of {by} count from 0", f"start with {by}")
    local = [_number(name, given[name]) if name in given else None for name in names[2:]]
    first = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") if by == "horovodrun" else None
    if first is None and (listed := environment.get("SLURM_JOB_NODELIST")):
        first = nodes(listed)[0]
    # jobs of one machine differ in one of these
    job = environment.get("SLURM_JOB_ID") or next(
        (
            environment[name]
            for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HOROVOD_GLOO_RENDEZVOUS_PORT")
            if name in environment
        ),
        "",
    )
    return Member(
        by=by,
        number=number,
        count=count,
        local_number=local[0],
        local_count=local[1],
        is_one_a_machine=local[1] == 1,
        host=first,
        port=_port(job, by),
        variables=_typed(given),
    )


def _of_slurm(environment: Mapping[str, str]) -> Member | None:
    """A task of a step. A batch script, and the shell of salloc, are in no step that counts tasks."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    given = {name: text for name in names if (text := environment.get(name, "").strip())}
    if "SLURM_STEP_NUM_TASKS" not in given:
        return None
    count = _number("SLURM_STEP_NUM_TASKS", given["SLURM_STEP_NUM_TASKS"], 1)
    if count > 1 and _is_no_task(environment):
        return None
    if "SLURM_PROCID" not in given:
        if count == 1:
            return None
        why = "which of them this process is, Slurm says in SLURM_PROCID"
        raise UserError(f"{_typed(given)}: no SLURM_PROCID", why, "hand on all variables that begin with SLURM_")
    number = _number("SLURM_PROCID", given["SLURM_PROCID"])
    if number >= count:
        raise UserError(_typed(given), "tasks count from 0", "start with srun")
    listed = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if environment.get(name)), None)
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    tasks = counts(per_node) if per_node else []
    at = _number("SLURM_NODEID", environment.get("SLURM_NODEID", "").strip() or "0")
    return Member(
        by="srun",
        number=number,
        count=count,
        local_number=_number("SLURM_LOCALID", given["SLURM_LOCALID"]) if "SLURM_LOCALID" in given else None,
        local_count=tasks[at] if at < len(tasks) and "SLURM_NODEID" in environment else None,
        is_one_a_machine=bool(tasks) and set(tasks) == {1},
        host=nodes(environment[listed], listed)[0] if listed else None,
        port=_port(environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")),
        own_gpus=_own_gpus(environment),
        variables=_typed(given),
    )


def idle_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of a Slurm job that a run leaves idle which is started without srun, in its script or shell; else 0."""
    tasks = environment.get("SLURM_NTASKS", "").strip()
    # in a step of one task, Slurm's newer releases count that step's alone
    if not environment.get("SLURM_JOB_ID") or not tasks.isdecimal() or member(environment) is not None:
        return 0
    return int(tasks) if int(tasks) > 1 else 0


def run_client(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and read what it prints.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: the controller did not answer within these seconds.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def node_address(node: str) -> str:
    """Where a node of Slurm's is reached: by its name; else, where that is no machine's, by what scontrol says."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        pass
    else:
        return node
    if shutil.which("scontrol") is None:
        return node
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        answer = run_client(command, ANSWER_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", answer)
    return found[1] if found else node


def _own_gpus(environment: Mapping[str, str]) -> int | None:
    """GPUs that are this task's alone, by ``--gpus-per-task`` or ``--gpu-bind``; None: it sees all of the node."""
    bind = environment.get("SLURM_GPU_BIND", "").strip().lower().removeprefix("verbose,")
    if bind.startswith(("single", "map_gpu")):
        return 1
    if bind.startswith("per_task:") and bind.removeprefix("per_task:").isdecimal():
        return int(bind.removeprefix("per_task:"))
    if bind:
        return None
    asked = environment.get("SLURM_GPUS_PER_TASK", "")
    # 2, a100:2; newer: cpu=4,gres/gpu:a100=2
    resources = re.search(r"gres[/:]gpu[^,]*?[:=](\d{1,4})(?=,|$)", environment.get("SLURM_TRES_PER_TASK", ""))
    found = re.search(r"(\d{1,4})$", asked) or resources
    return int(found[1]) if found else None


def _is_no_task(environment: Mapping[str, str]) -> bool:
    """Whether the variables of a step are about others, or about a shell that somebody types into.

    A batch script that was submitted from inside a step inherits that step's variables; what is started in a shell on
    a terminal looks like the step's task.
    """
    task = environment.get("SLURM_TASK_PID", "")
    if not task.isdecimal():
        return False
    try:
        words = Path(f"/proc/{task}/cmdline").read_text(errors="replace").split("\0")
        # its fields follow the name in brackets, which may hold anything: state ppid pgrp session tty_nr
        fields = Path(f"/proc/{task}/stat").read_text(errors="replace").rpartition(")")[2].split()
        parent = Path(f"/proc/{fields[1]}/cmdline").read_text(errors="replace")
    except (OSError, IndexError):
        return False
    # as slurmstepd names itself: slurmstepd: [7.batch]
    if re.match(r"slurmstepd: \[\d+\.(batch|interactive|extern)\]", parent):
        return True
    program, options = Path(words[0].lstrip("-")).name, [word for word in words[1:] if word]
    reads = all(option.startswith("-") and not re.fullmatch(r"-[a-z]*c[a-z]*", option) for option in options)
    return fields[4] != "0" and program in _SHELLS and reads


def _port(job: str, step: str) -> int:
    """A port of this step alone, as far as possible: neighbouring jobs get neighbouring ones, each with room."""
    number = int(job) if job.isdecimal() else sum(byte * 31**at for at, byte in enumerate(job.encode()[:64]))
    steps = int(step) if step.isdecimal() else 0
    return FIRST_PORT + (number * 16 + steps % 16) % NUM_PORTS


def _typed(given: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in given.items())


def _number(name: str, text: str, least: int = 0) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) >= least:
        return int(text)
    raise UserError(f"{name}={excerpt(text)}", f"it is a whole number of at least {least}", f"unset {name}")
