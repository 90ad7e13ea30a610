"""Who is here: the ranks of a run, and which of them share a machine."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from paceline.contract.errors import UserError
from paceline.distributed.exchange import Exchange
from paceline.distributed.stores import meeting_point
from paceline.distributed.waiting import Waiting
from paceline.machine.cluster import Place
from paceline.machine.jobs import JobStarter


@dataclass(frozen=True, kw_only=True)
class Present:
    """The ranks of a run, once all are here."""

    place: Place
    """This rank's place; local numbers that were guessed are counted by now."""
    leader: int
    """The rank that goes first on this machine."""
    machines: tuple[tuple[int, ...], ...]
    """The ranks of each machine."""
    is_one_machine: bool
    """Whether there is one, and nobody has said otherwise, as where containers of one name share it."""


def call_roll(exchange: Exchange, place: Place, waiting: Waiting) -> Present:
    """Wait for all ranks, and count who is on which machine; a collective.

    Raises:
        UserError: two processes have one rank, or ranks were told different sizes of the world.
        LostRank: a rank did not arrive.
    """
    if not exchange.enter(f"rank {place.rank}"):
        why = f"another process has this rank at {place.init_method}, or an earlier run had"
        fix = "give each process a RANK of its own; after a crash, remove the file or take another port"
        raise UserError(f"RANK = {place.rank}: taken", why, fix)
    # where each process was left a GPU of its own, each counts from 0
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    local = None if place.is_local_guessed else [place.local_rank, place.local_world_size]
    report = functools.partial(waiting.report, meeting_point(place))
    found = exchange.all("joining", [[_machine(), gpus], local, place.world_size], report=report)
    _check_sizes(place, [size for _, _, size in found])
    machines: dict[str, list[int]] = {}
    for rank, ((machine, _), _, _) in enumerate(found):
        machines.setdefault(machine, []).append(rank)
    local_ranks = [
        said[0] if said else sum(other == where for other, _, _ in found[:rank])
        for rank, (where, said, _) in enumerate(found)
    ]
    own = machines[_machine()]
    if place.is_local_guessed:
        place = replace(place, local_rank=local_ranks[place.rank], local_world_size=len(own), is_local_guessed=False)
    visible = [gpus for (_, gpus), _, _ in (found[rank] for rank in own)]
    if place.started in get_args(JobStarter) and None not in visible and len({*visible}) == len(own) > 1:
        # the job gave each of its processes GPUs of its own, and each counts them from 0
        place = replace(place, own_gpus=len((gpus or "").split(",")))
    # where one machine poses as several, each of them has its own first rank
    firsts = [rank for rank in own if local_ranks[rank] == 0]
    return Present(
        place=place,
        leader=max((rank for rank in firsts if rank <= place.rank), default=min(firsts, default=place.rank)),
        machines=tuple(tuple(ranks) for ranks in machines.values()),
        is_one_machine=len(machines) == 1 and all(not said or said[1] == size for _, said, size in found),
    )


def _check_sizes(place: Place, sizes: list[int]) -> None:
    if set(sizes) != {place.world_size}:
        other = next(rank for rank, size in enumerate(sizes) if size != place.world_size)
        why = f"rank {other} was told that there are {sizes[other]} ranks"
        raise UserError(f"WORLD_SIZE = {place.world_size}", why, "give every rank the same WORLD_SIZE")


def _machine() -> str:
    """A name that no other machine has, nor a container that shares one under a name of its own."""
    try:
        # tells machines of one name apart
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return f"{socket.gethostname()} {boot_id}"
