"""Who this process is among the processes of a run.

A further way to be started is one more source of a ``Place`` in ``find_place``, and one more ``Starter``. What
srun, mpirun and horovodrun say is read in ``jobs.py``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from paceline.contract.errors import UserError, excerpt
from paceline.machine.jobs import JobStarter, Member, member

LOOPBACK = "127.0.0.1"

LARGEST_PORT = 65535

TIMEOUT_SECONDS = 600.0
"""How long ranks wait for one another: a first download and a compilation take minutes."""

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The environment variables with which torch.distributed finds the other ranks."""

LAUNCHER = "PACELINE_LAUNCHER"
"""Variable that our launcher sets for the ranks it starts: its process id."""

Starter = Literal["alone", "paceline", "torchrun", "environment"] | JobStarter


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is among the processes of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine; it chooses the GPU."""
    local_world_size: int = 1
    """Processes of this machine, as far as they are known: all of them where ranks meet on loopback or in a file."""
    is_local_guessed: bool = False
    """Whether nobody said the two local numbers: they are guessed from the address, until the ranks have met and
    counted who is on which machine."""
    started: Starter = "alone"
    """By what: nothing, our launcher, torchrun, what starts the processes of a job, or somebody who numbered the ranks
    by variables or options."""
    init_method: str | None = None
    """Where ranks meet: tcp://HOST:PORT, file:///PATH or env:// (MASTER_ADDR, MASTER_PORT); None: alone."""
    own_gpus: int | None = None
    """GPUs that this rank alone sees, where a job gives each its own; None: ranks of a machine see the same ones."""

    @property
    def gpu(self) -> int:
        """This rank's GPU, counted among those that it sees."""
        return self.local_rank if self.own_gpus is None else 0

    @property
    def is_rank(self) -> bool:
        """Whether a launcher started this process, or somebody as one of several.

        Variables that number a world of one process are what clusters leave to a single replica: it may start ranks.
        """
        return self.world_size > 1 or self.started in ("paceline", "torchrun")


def find_place(
    environment: Mapping[str, str], *, init: str | None = None, rank: int | None = None, world_size: int | None = None
) -> Place:
    """This process's place, from ``--init``, ``--rank`` and ``--world-size``, or from the environment.

    In the environment it takes MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE together to be a rank, or one of several
    processes of srun, mpirun or horovodrun. One of the four on its own, an address without a number, or a world of one
    process are what clusters leave lying about: alone.

    LOCAL_RANK and LOCAL_WORLD_SIZE are optional. Without them it is guessed until the ranks have met: those that meet
    on the loopback address or in a file are all on this machine, and others are one a machine.

    Raises:
        UserError: a value or an option is missing, or they contradict one another; or several processes of a job
            would each be a run of its own.
    """
    given = {name: text for name in RENDEZVOUS if (text := environment.get(name, "").strip())}
    started = _starter(environment)
    # who started this process last, numbered it: our launcher and torchrun may run inside a job
    job = member(environment) if started == "environment" else None
    if init is not None or rank is not None or world_size is not None:
        if started != "environment" or len(given) == len(RENDEZVOUS):
            raise _given_twice(started, given)
        return _of_all(job, _from_options(environment, init, rank, world_size))
    if len(given) == len(RENDEZVOUS):
        return _of_all(job, _from_variables(environment, given, started))
    if job is not None and job.count > 1:
        return _from_job(job, given)
    is_one_process = given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == "0"
    if len(given) <= 1 or is_one_process or not given.keys() & {"RANK", "WORLD_SIZE"}:
        return Place()
    raise _incomplete(given)


def check_gpus(place: Place, num_gpus: int) -> None:
    """Make sure that this machine has a GPU for this rank.

    Raises:
        UserError: it has fewer GPUs than ranks.
    """
    if place.own_gpus is not None and place.own_gpus > 1:
        raise UserError(
            f"{place.own_gpus} GPUs for each of {place.world_size} tasks",
            "a rank takes one GPU, and the others would stand idle",
            f"--gpus-per-task=1 with {place.own_gpus} times as many tasks; or one task a node, which starts its ranks "
            "itself: srun --ntasks-per-node=1 paceline train ... --gpus N",
        )
    if place.gpu < num_gpus:
        return
    fixes = {
        "torchrun": f"torchrun --nproc-per-node {num_gpus}",
        "srun": f"srun --ntasks-per-node={num_gpus}",
        "mpirun": f"mpirun --map-by ppr:{num_gpus}:node",
        "horovodrun": f"horovodrun with {num_gpus} slots for each host",
        "environment": "LOCAL_RANK=0" + f" to LOCAL_RANK={num_gpus - 1}" * (num_gpus > 1),
    }
    raise UserError(
        f"LOCAL_RANK = {place.local_rank}: no GPU for rank {place.rank}",
        f"each rank takes a GPU, and this machine has {num_gpus}, counted from 0",
        fixes.get(place.started, f"--gpus {num_gpus}") if num_gpus else "--set device=cpu",
    )


def rank_in(environment: Mapping[str, str]) -> int:
    """The rank that the environment says, for who asks whether to speak; 0 where it says none."""
    try:
        return find_place(environment).rank
    except UserError:
        return 0


def _from_job(job: Member, given: Mapping[str, str]) -> Place:
    """The place of one of several processes that a job started.

    MASTER_ADDR and MASTER_PORT, where they are set, say where to meet; RANK and WORLD_SIZE may only say the same.

    Raises:
        UserError: they say something else, or nobody knows where to meet.
    """
    for name, own in (("RANK", job.number), ("WORLD_SIZE", job.count)):
        if name in given and given[name] != str(own):
            why = f"{job.by} counts otherwise: {job.variables}"
            raise UserError(f"{name}={excerpt(given[name])}", why, f"unset {name}, or {name}={own}")
    is_one_machine = job.local_count == job.count
    host = given.get("MASTER_ADDR") or (LOOPBACK if is_one_machine else job.host)
    if host is None:
        raise UserError(
            f"{job.variables}: no MASTER_ADDR",
            f"{job.by} does not say which machine the first of {job.count} processes is on",
            f"export MASTER_ADDR=$(hostname) MASTER_PORT={job.port} there; mpirun -x hands both on",
        )
    port = _number("MASTER_PORT=", given["MASTER_PORT"], 1, LARGEST_PORT) if "MASTER_PORT" in given else job.port
    is_guessed = job.local_number is None or job.local_count is None
    local_rank = job.local_number or 0
    return Place(
        rank=job.number,
        world_size=job.count,
        local_rank=local_rank,
        local_world_size=job.local_count or local_rank + 1,
        is_local_guessed=is_guessed,
        started=job.by,
        init_method=f"tcp://[{host}]:{port}" if ":" in host.strip("[]") and host[0] != "[" else f"tcp://{host}:{port}",
        own_gpus=job.own_gpus,
    )


def _of_all(job: Member | None, place: Place) -> Place:
    """The place, where it counts at least the processes that were started together.

    Raises:
        UserError: it is that of a run of its own, and the others would each be one, too.
    """
    if job is None or place.world_size >= job.count:
        return place
    raise UserError(
        f"WORLD_SIZE={place.world_size} for each of {job.count} processes",
        f"{job.by} started them together ({job.variables}), and they would be several runs",
        f"unset {' '.join(RENDEZVOUS)}; for runs of their own, start each with a job of its own",
    )


def _starter(environment: Mapping[str, str]) -> Starter:
    """Who numbered the ranks, if they are numbered; torch.distributed.launch is torchrun under another name."""
    if LAUNCHER in environment:
        return "paceline"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"


def _from_variables(environment: Mapping[str, str], given: Mapping[str, str], started: Starter) -> Place:
    _number("MASTER_PORT=", given["MASTER_PORT"], 1, LARGEST_PORT)
    world_size = _number("WORLD_SIZE=", given["WORLD_SIZE"], 1)
    rank = _number("RANK=", given["RANK"], 0)
    if rank >= world_size:
        raise _beyond("RANK=", rank, "WORLD_SIZE=", world_size)
    is_one_machine = _is_loopback(given["MASTER_ADDR"])
    return _on_machine(environment, rank, world_size, is_one_machine, started=started, init_method="env://")


def _from_options(environment: Mapping[str, str], init: str | None, rank: int | None, world_size: int | None) -> Place:
    if init is None or rank is None or world_size is None:
        options = {"--init": init, "--rank": rank, "--world-size": world_size}
        example = {"--init": f"tcp://{LOOPBACK}:29500", "--rank": 0, "--world-size": 2}
        raise UserError(
            f"{' and '.join(name for name, value in options.items() if value is None)}: missing",
            "a rank says where ranks meet, which one it is, and how many there are",
            " ".join(f"{name} {example[name] if value is None else value}" for name, value in options.items()),
        )
    _number("--world-size ", str(world_size), 1)
    _number("--rank ", str(rank), 0)
    if rank >= world_size:
        raise _beyond("--rank ", rank, "--world-size ", world_size)
    host = _meeting_host(init)
    is_one_machine = host is None or _is_loopback(host)
    return _on_machine(environment, rank, world_size, is_one_machine, started="environment", init_method=init)


def _on_machine(
    environment: Mapping[str, str],
    rank: int,
    world_size: int,
    is_one_machine: bool,
    *,
    started: Starter,
    init_method: str,
) -> Place:
    """The place of a rank, with LOCAL_RANK and LOCAL_WORLD_SIZE, or what follows from where the ranks meet."""
    own, size = (environment.get(name, "").strip() for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank = _number("LOCAL_RANK=", own, 0) if own else rank if is_one_machine else 0
    least = world_size if is_one_machine else local_rank + 1
    local_world_size = _number("LOCAL_WORLD_SIZE=", size, 1) if size else least
    if local_world_size > world_size:
        raise UserError(
            f"LOCAL_WORLD_SIZE={size}" if size else f"LOCAL_RANK={own}",
            f"all machines together have {world_size} ranks",
            "unset LOCAL_RANK LOCAL_WORLD_SIZE, or count the ranks of this machine alone",
        )
    if local_rank >= local_world_size:
        why = f"{local_world_size} of the ranks are on this machine, counted from 0"
        raise UserError(f"LOCAL_RANK={local_rank}", why, f"LOCAL_RANK={min(rank, local_world_size - 1)}")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        is_local_guessed=not own,
        started=started,
        init_method=init_method,
    )


def _meeting_host(init: str) -> str | None:
    """The host of tcp://HOST:PORT; None for a file.

    Raises:
        UserError: it is neither, or not whole.
    """
    what, example = f"--init {excerpt(init)}", f"--init tcp://{LOOPBACK}:29500, or --init file:///tmp/ranks"
    if init == "env://":
        raise UserError(what, f"{', '.join(RENDEZVOUS)} are read without it", "leave the options out")
    try:
        parts = urlsplit(init)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(what, str(error), example) from None
    rest = parts.path or parts.query or parts.fragment or parts.username
    if parts.scheme == "tcp" and host and port and not rest:
        return host
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        return None
    whys = {
        "tcp": "it takes a host and a port, and nothing else",
        "file": "after file:// comes a whole path, which begins with a third /",
    }
    raise UserError(what, whys.get(parts.scheme, "ranks meet at tcp:// or file://"), example)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _number(set_by: str, text: str, least: int, most: int = 10**9 - 1) -> int:
    """The whole number in ``text``; ``set_by`` is what stands before it where it is set: ``RANK=`` or ``--rank ``."""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most:
        return int(text)
    if most == LARGEST_PORT:
        raise UserError(f"{set_by}{excerpt(text)}", f"a port is a number from {least} to {most}", f"{set_by}29500")
    raise UserError(f"{set_by}{excerpt(text)}", f"it is a whole number of at least {least}", f"{set_by}{least}")


def _beyond(rank_set: str, rank: int, size_set: str, world_size: int) -> UserError:
    ranks = f"{rank_set}0" + f" to {rank_set}{world_size - 1}" * (world_size > 1)
    return UserError(
        f"{rank_set}{rank} with {size_set}{world_size}", "ranks count from 0", f"{ranks}, or {size_set}{rank + 1}"
    )


def _incomplete(given: Mapping[str, str]) -> UserError:
    example = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
    missing = [name for name in RENDEZVOUS if name not in given]
    return UserError(
        f"{' '.join(f'{name}={text}' for name, text in given.items())}: no {' and no '.join(missing)}",
        f"a rank needs all of {', '.join(RENDEZVOUS)}",
        f"export {' '.join(f'{name}={example[name]}' for name in missing)}; "
        f"or, to train in one process, unset {' '.join(given)}",
    )


def _given_twice(started: Starter, given: Mapping[str, str]) -> UserError:
    by = {
        "paceline": "paceline's launcher, which started this process",
        "torchrun": "torchrun, which started this process",
    }
    return UserError(
        "--init, --rank, --world-size: the place of this process is given twice",
        f"the other time by {by.get(started, ', '.join(f'{name}={text}' for name, text in given.items()))}",
        "leave the options out" if started in by else f"leave the options out, or unset {' '.join(given)}",
    )


def named(ranks: Collection[int]) -> str:
    """``rank 2``; ``ranks 0, 1``; ``ranks 0-6, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"
