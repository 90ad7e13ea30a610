"""Where ranks meet: the key-value store of a run, opened by its first rank and joined by the others.

A store of ours for ranks of one machine listens on loopback alone, and one for several machines on the address where
they meet. Torch's own TCPStore listens on every address unless it is handed a socket that is bound already, so it is
handed one. Whether all ranks of an address of the network are on this machine can only be known when they have met.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import DistNetworkError, FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from paceline.contract.errors import UserError
from paceline.contract.last_resort import IN_TORCH
from paceline.distributed.exchange import GRACE_SECONDS, LostRank, seconds
from paceline.distributed.sockets import STORE_FD, listen
from paceline.distributed.waiting import Waiting
from paceline.machine.cluster import LOOPBACK, Place
from paceline.machine.jobs import node_address

PAUSE_SECONDS = 0.05


def open_store(place: Place, timeout_seconds: float, waiting: Waiting) -> Store:
    """The store of this run.

    Under torchrun it is the agent's; else rank 0 opens one at the address of ``place.init_method`` (``tcp://HOST:PORT``,
    ``file:///PATH``, or ``env://`` for MASTER_ADDR and MASTER_PORT).

    Raises:
        UserError: an address that cannot be used, or is taken.
        LostRank: rank 0 does not answer there within ``timeout_seconds``.
    """
    if path := _meeting_file(place):
        return _file_store(path, place.world_size)
    host, port = _address(place)
    if place.rank == 0 and not _is_agents():
        return _serve(host, port, place, timeout_seconds)
    return _connect(host, port, place.world_size, timeout_seconds, waiting)


@contextmanager
def leaving(place: Place) -> Iterator[None]:
    """Inside, a rank drops its store, as all others do; a file where they met is gone when the last one has.

    Afterwards rank 0's store is gone too, so that a rank which joins again does not meet the one it has left.

    torch counts who has left the file, and who has it open, one after the other, and removes it where one rank finds
    both counts full: of two that leave at the same time, each may find the other's half missing. A file opened for no
    ranks is removed by the second count alone.
    """
    path = _meeting_file(place)
    last = FileStore(path, 0) if path else None
    watched = None if place.rank == 0 or path or _is_agents() else _watched(*_address(place))
    yield
    del last
    if watched is not None:
        with watched, suppress(OSError):
            # nothing is ever sent there, but the end is told
            watched.recv(1)


def on_one_machine(place: Place) -> bool:
    """Whether all ranks are known to be on this machine."""
    return place.local_world_size == place.world_size


def _is_agents() -> bool:
    """Whether the store is that of torchrun's agent, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_point(place: Place) -> str:
    """Return where ranks meet, as messages show it."""
    if path := _meeting_file(place):
        return path
    host, port = _address(place)
    return f"{host}:{port}"


def _meeting_file(place: Place) -> str:
    """Where ranks meet in a file; else empty."""
    method = urlsplit(place.init_method or "env://")
    return method.path if method.scheme == "file" else ""


def _address(place: Place) -> tuple[str, int]:
    method = urlsplit(place.init_method or "env://")
    if method.scheme == "tcp":
        host, port = method.hostname or "", method.port or 0
        if place.started == "srun" and not on_one_machine(place):
            host = node_address(host)
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # the name may stand for an address of the network, where the store does not listen
    return (LOOPBACK if on_one_machine(place) and not _is_agents() else host), port


def _file_store(path: str, world_size: int) -> Store:
    try:
        # FileStore itself would try for minutes, deaf to signals
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        fix = "name a file in an existing folder that every rank can write to"
        raise UserError(f"file://{path}: cannot be opened", error.strerror or str(error), fix) from None
    return FileStore(path, world_size)


def _serve(host: str, port: int, place: Place, timeout_seconds: float) -> Store:
    listening = _descriptor(port) if on_one_machine(place) else _descriptor_at(host, port)
    try:
        return TCPStore(
            # rank 0 connects to its own store, deaf to signals: the address may be no machine's, or one that passes on
            LOOPBACK if listening is None else host,
            port,
            place.world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,  # our own roll call names who is missing
            master_listen_fd=listening,
        )
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            why = "another process listens there, perhaps a rank of an earlier run"
            raise UserError(f"MASTER_PORT = {port}: in use on this machine", why, f"MASTER_PORT={port + 1}") from None
        what, why = f"MASTER_PORT = {port}: the store cannot be opened", str(error).splitlines()[0]
        raise UserError(what, why, "another port, such as MASTER_PORT=29500") from None


def _descriptor(port: int) -> int:
    """A socket on loopback that the store takes over: our launcher's, or one of our own."""
    # taken out of the environment: it is handed over once, and children have no use for it
    inherited = os.environ.pop(STORE_FD, None)
    if inherited is None:
        return listen(port).detach()
    os.set_inheritable(int(inherited), False)
    return int(inherited)


def _descriptor_at(host: str, port: int) -> int | None:
    """A socket on this address alone; None, for every address, where it cannot be known to be the one to listen on.

    A name may stand for loopback on the machine that bears it, and an address may be another machine's that passes on.

    Raises:
        UserError: the name stands for no machine.
    """
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        raise _no_machine(host, error) from None
    try:
        ipaddress.ip_address(host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except (ValueError, OSError):
        return None
    return listen(port, host).detach()


def _connect(host: str, port: int, world_size: int, timeout_seconds: float, waiting: Waiting) -> Store:
    deadline = time.monotonic() + timeout_seconds
    _await_listener(host, port, deadline, timeout_seconds, waiting)
    made: list[Store | Exception] = []

    def connect() -> None:
        timeout = timedelta(seconds=timeout_seconds)
        try:
            made.append(TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            made.append(error)

    # where a socket accepts and never answers, TCPStore waits for ever, deaf to signals
    thread = threading.Thread(target=connect, name=f"{IN_TORCH}connect", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline:
        waiting.report(f"{host}:{port}", lambda: [0])
        thread.join(PAUSE_SECONDS)
    if not made:
        why = f"what listens there has not answered as a store within {seconds(timeout_seconds)}"
        raise _no_answer(host, port, why)
    if isinstance(made[0], Exception):
        raise _no_answer(host, port, str(made[0]).splitlines()[0])
    return made[0]


def _await_listener(host: str, port: int, deadline: float, timeout_seconds: float, waiting: Waiting) -> None:
    """Return once somebody listens; TCPStore would wait too, but with pages of warnings."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(PAUSE_SECONDS, deadline - time.monotonic())).close()
            return
        except socket.gaierror as error:
            raise _no_machine(host, error) from None
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"no answer within {seconds(timeout_seconds)}: {error.strerror or error}"
                raise _no_answer(host, port, why) from None
            waiting.report(f"{host}:{port}", lambda: [0])
            time.sleep(PAUSE_SECONDS)


def _watched(host: str, port: int) -> socket.socket | None:
    """A connection that ends with the store, read for ``GRACE_SECONDS`` at most; None: the store has ended."""
    try:
        return socket.create_connection((host, port), timeout=GRACE_SECONDS)
    except OSError:
        return None


def _no_machine(host: str, error: socket.gaierror) -> UserError:
    why = f"no machine of this name can be found: {error.strerror}"
    return UserError(f"MASTER_ADDR = {host}", why, "the name or address of rank 0's machine")


def _no_answer(host: str, port: int, why: str) -> LostRank:
    fix = "look at the log of rank 0; every rank needs its MASTER_ADDR and MASTER_PORT, and no firewall between"
    return LostRank(f"rank 0 is not at {host}:{port}", why, fix, ranks=(0,))
