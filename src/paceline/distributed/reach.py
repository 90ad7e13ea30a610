"""Whether the machines of a run reach one another at ports that nobody has opened for it.

gloo and NCCL connect ranks at ports that the system chooses. Where they are closed, gloo tries for five times the
time-out, deaf to signals, and names no rank. So the first ranks of the machines try before, in its place.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence

from paceline.contract.errors import UserError
from paceline.distributed.exchange import Exchange, seconds
from paceline.distributed.sockets import listen
from paceline.machine.cluster import LOOPBACK

TRY_SECONDS = 10.0
"""How long the machines may take to connect to one another."""

INTERFACE = "GLOO_SOCKET_IFNAME"


def check_reach(exchange: Exchange, rank: int, firsts: Sequence[int], timeout_seconds: float) -> None:
    """Make sure that machines can connect where gloo will; a collective.

    Args:
        firsts: one rank of each machine.

    Raises:
        UserError: on all ranks: who does not reach whom, and at which address.
    """
    if len(firsts) == 1:
        return
    limit = min(TRY_SECONDS, timeout_seconds / 2)
    with _listening() if rank in firsts else contextlib.nullcontext() as address:
        addresses = exchange.all("the addresses of the machines", address)
        others = {other: addresses[other] for other in firsts if other != rank and addresses[other]}
        failure = _first_failure(others, limit) if rank in firsts else None
        failures = exchange.all("reaching the other machines", failure)
    for tried, failed in enumerate(failures):
        if failed:
            raise _out_of_reach(tried, *failed)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[str, int] | None]:
    """Listens, at a port that is free, on the address that gloo takes; None where that cannot be told."""
    interface = os.environ.get(INTERFACE, "").partition(",")[0]
    host = _address_of(interface) if interface else socket.gethostname()
    if host is None:
        yield None
        return
    try:
        listening = listen(0, host)
    except UserError:
        # as gloo does where a machine's own name leads nowhere
        listening = listen(0, LOOPBACK)
    with listening:
        yield listening.getsockname()[:2]


def _address_of(interface: str) -> str | None:
    """The first IPv4 address of a network interface, from Linux's netdevice(7)."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address, name = 0x8915, interface.encode()[:15]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, get_address, struct.pack("256s", name))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def _first_failure(addresses: dict[int, list[int | str]], limit: float) -> tuple[int, str, str] | None:
    """The first rank that does not answer, its address, and why."""
    deadline = time.monotonic() + limit
    for other, (host, port) in addresses.items():
        try:
            socket.create_connection((str(host), int(port)), max(0.1, deadline - time.monotonic())).close()
        except TimeoutError:
            return other, f"{host}:{port}", f"no answer within {seconds(limit)}"
        except OSError as error:
            return other, f"{host}:{port}", error.strerror or str(error)
    return None


def _out_of_reach(rank: int, other: int, address: str, why: str) -> UserError:
    ports = "beside MASTER_PORT, gloo and nccl connect at ports that the system chooses"
    host = address.rpartition(":")[0]
    if ipaddress.ip_address(host).is_loopback:
        ports = f"rank {other} listens on loopback, which its machine's own name stands for or {INTERFACE} says"
    return UserError(
        f"rank {rank} does not reach rank {other} at {address}: {why}",
        ports,
        f"open all TCP ports between the machines, or name a network where they are open: "
        f"{INTERFACE}=eth1 NCCL_SOCKET_IFNAME=eth1",
    )
