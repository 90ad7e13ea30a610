"""A run on several machines without a batch system: torchrun's line for each of them, printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.contract.errors import UserError, excerpt

_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*", re.ASCII)
"""A name or an address, with the user of a remote shell; nothing that a shell reads as an option."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What each machine runs."""

    hosts: Sequence[str]
    python: Sequence[str]
    """The Python of each, as a command."""
    arguments: Sequence[str]
    """Those of paceline."""
    ranks: int | Literal["gpu"]
    """On each machine; gpu: as many as it has GPUs, as torchrun counts them."""
    on_cpu: bool = False
    port: int = 29500


def parse_hosts(text: str) -> list[str]:
    """The machines in ``a,b``; the ranks meet on the first.

    Raises:
        UserError: one is no name, or named twice.
    """
    hosts = [word.strip() for word in text.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise UserError(f"--hosts {excerpt(text)}", "machines are names, with commas between them", "--hosts a,b")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts {excerpt(text)}", "a machine is named twice", f"--hosts {','.join({*hosts})}")
    return hosts


def lines(machines: Machines) -> list[str]:
    """The line of each machine, as it is typed there, in the same folder."""
    meet_at = machines.hosts[0].rpartition("@")[2]
    hidden = "CUDA_VISIBLE_DEVICES= " if machines.on_cpu else ""
    return [
        hidden
        + shlex.join(
            [
                *(*machines.python, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(machines.hosts)), "--node-rank", str(number)),
                *("--nproc-per-node", str(machines.ranks)),
                *("--master-addr", meet_at, "--master-port", str(machines.port)),
                *("-m", "paceline", *machines.arguments),
            ]
        )
        for number in range(len(machines.hosts))
    ]
