"""Sockets that listen on one address alone; a store that is made of one can be reached from nowhere else."""

from __future__ import annotations

import errno
import socket

from paceline.contract.errors import UserError
from paceline.machine.cluster import LOOPBACK

STORE_FD = "PACELINE_STORE_FD"
"""Variable of rank 0: the descriptor of a socket that already listens on MASTER_PORT of the loopback address."""


def listen(port: int = 0, host: str = LOOPBACK) -> socket.socket:
    """A socket that listens on this address alone, so that a store made of it can be reached from nowhere else.

    torch's TCPStore would listen on every address of the machine, whichever it is given.

    Args:
        port: 0: any that is free.

    Raises:
        UserError: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        # a port that an ended run has just left is free
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        raise _cannot_listen(host, port, error) from None
    return listening


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno != errno.EADDRINUSE:
        why = error.strerror or str(error)
        return UserError(f"{host}:{port}: cannot listen there: {why}", fix=f"an address of this machine: {LOOPBACK}")
    with listen(0, host) as other:
        free = other.getsockname()[1]
    why = "another process listens there, perhaps a rank of an earlier run"
    return UserError(f"port {port} of {host}: in use", why, f"port {free} is free")
