"""How many ranks are started on this machine, and on which GPUs: every mistake is found before any process starts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from paceline.contract.errors import UserError, excerpt
from paceline.distributed.sockets import STORE_FD
from paceline.machine.cluster import LAUNCHER, LOOPBACK, RENDEZVOUS, Place, find_place
from paceline.machine.facts import Facts, visible
from paceline.machine.jobs import JobStarter, member, node_address
from paceline.verbs.short import without

Gpus = int | Literal["all"]
"""A number of GPUs, or all that are visible."""


def parse_gpus(value: object) -> Gpus:
    """Return the value of ``--gpus``: a number from 1, or ``all``, which ``auto`` and ``-1`` mean too.

    Raises:
        UserError: it is neither.
    """
    text = str(value).strip().lower()
    if text in ("all", "auto", "-1"):
        return "all"
    if text.isascii() and text.isdecimal() and 0 < len(text) <= 9 and int(text):
        return int(text)
    fix = "--gpus 2, or --gpus all"
    if text == "0":
        fix = f"{fix}; or leave it out: --set device=cpu trains on the CPU"
    elif match := re.fullmatch(r"[\[(]?(\d{1,4}(?:\s*,\s*\d{1,4})*),?[\])]?", text, re.ASCII):
        numbers = "".join(match[1].split())
        fix = f"--devices {numbers} names GPUs, --gpus {numbers.count(',') + 1} counts them"
    raise UserError(f"--gpus {excerpt(str(value))}", "it is a number of GPUs from 1, or all", fix)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks to start on this machine."""

    count: int
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES of every rank: "" hides all GPUs; None leaves it as it is. All ranks get the same list,
    and LOCAL_RANK chooses, so that a rank finds its GPU in one way, whoever started it: torchrun does the same."""
    threads: int = 1
    """OMP_NUM_THREADS of every rank, where it is not set."""
    first: int = 0
    """The number of the first of them in the world."""
    world_size: int = 0
    """Ranks of all machines; 0: only these."""
    meet_at: tuple[str, int] | None = None
    """Host and port where they meet those of other machines; None: there are none, and they meet on loopback."""

    @property
    def total(self) -> int:
        """Ranks of the run."""
        return self.world_size or self.count

    def see(self, machine: Facts) -> Facts:
        """The machine as a rank finds it: its GPUs are those that are left."""
        if self.gpus is None:
            return machine
        # where GPUs have no names but their numbers, these are all that is known of them
        left = visible(machine.gpus, self.gpus) or machine.gpus
        return replace(machine, gpus=left if self.gpus else ())

    def environment(self, base: Mapping[str, str], rank: int, port: int) -> dict[str, str]:
        """The variables of one rank: torchrun's, and who started it.

        Args:
            rank: counted from 0 on this machine.
            port: where ranks of one machine meet.
        """
        # what an outer torchrun left would make torch look for that one's store
        kept = {name: text for name, text in base.items() if not name.startswith(("TORCHELASTIC_", STORE_FD))}
        gpus = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return {
            "OMP_NUM_THREADS": str(self.threads),
            **kept,
            **gpus,
            "MASTER_ADDR": self.meet_at[0] if self.meet_at else LOOPBACK,
            "MASTER_PORT": str(self.meet_at[1] if self.meet_at else port),
            "RANK": str(self.first + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.total),
            "LOCAL_WORLD_SIZE": str(self.count),
            LAUNCHER: str(os.getpid()),
        }


def choose_ranks(
    command: str,
    facts: Callable[[], Facts],
    environment: Mapping[str, str],
    *,
    gpus: Gpus | None = None,
    processes: int | None = None,
    devices: str | None = None,
    device: str = "auto",
) -> Ranks:
    """The ranks that one of ``--gpus``, ``--processes`` and ``--devices`` asks for.

    Args:
        command: without these options; for the corrected command in messages.
        facts: of this machine; asked for only when the options do not contradict one another.
        gpus: number of GPUs: the first ones that are visible; or all of them.
        processes: number of processes on the CPU.
        devices: GPUs by number among the visible ones, as ``1,3``.
        device: the recipe's.

    Raises:
        UserError: the ranks cannot be started so.
    """
    asked = {"--gpus": gpus, "--processes": processes, "--devices": devices}
    options = [f"{name} {value}" for name, value in asked.items() if value is not None]
    _check_together(command, options)
    (option,) = options
    place = _place_to_start_from(command, option, environment)
    ranks = _chosen(command, option, facts, environment, gpus=gpus, processes=processes, devices=devices, device=device)
    if place.world_size == 1:
        return ranks
    host, _, port = (place.init_method or "").removeprefix("tcp://").rpartition(":")
    host = host.strip("[]") if place.started != "srun" else node_address(host.strip("[]"))
    world_size = place.world_size * ranks.count
    return replace(ranks, first=place.rank * ranks.count, world_size=world_size, meet_at=(host, int(port)))


def _chosen(
    command: str,
    option: str,
    facts: Callable[[], Facts],
    environment: Mapping[str, str],
    *,
    gpus: Gpus | None,
    processes: int | None,
    devices: str | None,
    device: str,
) -> Ranks:
    """The ranks of this machine alone."""
    # what is advised from here on says where to train
    command = shlex.join(without(shlex.split(command), "device"))
    if processes is not None:
        if device == "cuda":
            why = "--processes trains on the CPU"
            fix = f"{command} --gpus {processes}, or {command} {option} --set device=cpu"
            raise UserError(f"device = cuda with {option}", why, fix)
        return Ranks(count=processes, gpus="", threads=max(1, facts().cpu_count // processes))
    # without GPUs "all" is no number: what is advised then has the smallest that starts ranks
    count = 2 if gpus == "all" else gpus or len((devices or "").split(","))
    if device == "cpu":
        why = f"{option.split()[0]} trains on GPUs"
        fix = f"{command} {option} --set device=cuda, or {command} --processes {count}"
        raise UserError(f"device = cpu with {option}", why, fix)
    found = facts()
    if found.cuda_problem is not None:
        there = " --set device=cpu" if device == "cuda" else ""
        raise UserError(option, found.cuda_problem, f"{command} --processes {count}{there} trains on the CPU")
    num_gpus, setting = len(found.gpus), environment.get("CUDA_VISIBLE_DEVICES")
    seen = f"{num_gpus} GPU{'s' * (num_gpus != 1)}" + (
        f" visible here (CUDA_VISIBLE_DEVICES={setting})" if setting is not None else " in this machine"
    )
    if gpus is not None:
        gpus = num_gpus if gpus == "all" else gpus
        if gpus > num_gpus:
            raise UserError(f"{option}: more processes than GPUs", f"there are {seen}", f"{command} --gpus {num_gpus}")
        return Ranks(count=gpus, threads=max(1, found.cpu_count // gpus))
    numbers = _numbers(command, devices or "", num_gpus, seen)
    # numbers mean one GPU to nvidia-smi and may mean another to CUDA: where it is known, the name that they share
    entries = [entry.strip() for entry in setting.split(",")] if setting is not None else []
    names = [found.gpus[n].uuid or (entries[n] if entries else str(n)) for n in numbers]
    return Ranks(count=len(names), gpus=",".join(names), threads=max(1, found.cpu_count // len(names)))


def _check_together(command: str, options: list[str]) -> None:
    """Refuse more than one of the options."""
    if len(options) > 1:
        whys = {
            "--gpus": "it counts GPUs",
            "--processes": "it counts processes on the CPU",
            "--devices": "it lists GPUs, one process each",
        }
        why = "; ".join(f"{option.split()[0]}: {whys[option.split()[0]]}" for option in options)
        raise UserError(" with ".join(options), why, " or ".join(f"{command} {option}" for option in options))


def _place_to_start_from(command: str, option: str, environment: Mapping[str, str]) -> Place:
    """This process's place, where it may start ranks: it is alone, or a job started one such process on each machine.

    Raises:
        UserError: the ranks are started already, or more of these processes share a machine.
    """
    place = find_place(environment)
    if not place.is_rank:
        return Place()
    if place.started not in get_args(JobStarter):
        names = " ".join(f"{name}={environment[name]}" for name in RENDEZVOUS)
        by = {"torchrun": "by torchrun", "paceline": "by paceline's launcher"}.get(place.started, f"by hand: {names}")
        unset = f", or unset {' '.join(RENDEZVOUS)}" if place.started == "environment" else ""
        raise UserError(f"{option}: this process is a rank already", f"started {by}", f"{command}{unset}")
    job = member(environment)
    if job is None or job.is_one_a_machine:
        return place
    one = {
        "srun": "srun --ntasks-per-node=1",
        "mpirun": "mpirun --map-by ppr:1:node",
        "horovodrun": "a slot for each host",
    }
    raise UserError(
        f"{option} with {place.world_size} processes of {place.started}",
        f"{job.variables}: each of them would start ranks, where each is one already",
        f"{place.started} {command} takes each as a rank; or, one a machine: {one[job.by]} {command} {option}",
    )


def _numbers(command: str, devices: str, num_gpus: int, seen: str) -> list[int]:
    """The GPUs in ``--devices``: each one exists and is named once."""
    what = f"--devices {devices or excerpt(devices)}"
    every = ",".join(map(str, range(num_gpus)))
    words = [word.strip() for word in devices.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= 9 for word in words):
        why = "GPUs are numbers from 0, with commas between them"
        raise UserError(what, why, f"{command} --devices {every}")
    numbers = [int(word) for word in words]
    beyond = sorted({number for number in numbers if number >= num_gpus})
    if beyond:
        gpu = f"no GPU {' and no GPU '.join(map(str, beyond))}"
        raise UserError(f"{what}: {gpu}", f"there are {seen}, counted from 0", f"{command} --devices {every}")
    once = list(dict.fromkeys(numbers))
    if len(once) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        fix = f"{command} --devices {','.join(map(str, once))}"
        raise UserError(f"{what}: GPU {twice} twice", "each process takes a GPU of its own", fix)
    return numbers
