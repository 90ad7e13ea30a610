"""Opening torch's process groups, by which backend and where they listen, and aborting one after an error."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from paceline.contract.errors import RecipeError, UserError, nearest
from paceline.contract.last_resort import IN_TORCH
from paceline.distributed.exchange import Exchange
from paceline.machine.cluster import Place, check_gpus

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that choose where gloo and NCCL listen; left to themselves, both take an address of the network."""

ABORT_SECONDS = 10.0
"""How long taking down a group after an error may take."""

WATCHDOG_SECONDS = 30.0
"""How much longer than hosts NCCL's watchdog waits for other ranks. It begins to wait before they do, for a kernel that
was launched earlier, and ends the processes of all ranks at once: none could say any more where it hangs."""

OPENING = "opening the process group"


def backend_of(backend: str | None, device: torch.device) -> str:
    """The backends by device, as torch writes them. Beside NCCL there is gloo, for what stays on the CPU.

    Args:
        backend: nccl, gloo or mpi; None: nccl on GPUs, gloo on the CPU.

    Raises:
        RecipeError: it is not there, or does not suit the device.
    """
    name = backend or ("nccl" if device.type == "cuda" else "gloo")
    available = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    what, fix = f"parallel.backend = {name}", "--set parallel.backend=auto: nccl on GPUs, gloo on the CPU"
    if name not in available:
        raise RecipeError(what, f"there is no such backend; {nearest(name, available)}", fix)
    if name == "nccl" and device.type != "cuda":
        raise RecipeError(what, f"it moves data between GPUs, and this run is on the {device.type}", fix)
    if not available[name]():
        why = f"the installed torch {torch.__version__} is built without it"
        built = "; torch has it only where it was built from source beside an MPI" if name == "mpi" else ""
        # on GPUs auto is nccl
        raise RecipeError(what, why + built, "--set parallel.backend=gloo" if name == "nccl" else fix)
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name


def gpu_of(place: Place, device: torch.device) -> torch.device:
    """The GPU of this rank, which becomes torch's current one.

    Raises:
        UserError: this machine has none for it.
    """
    check_gpus(place, torch.cuda.device_count())
    gpu = torch.device("cuda", place.gpu if device.index is None else device.index)
    torch.cuda.set_device(gpu)
    return gpu


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Inside, a process that is alone has a process group all the same, for libraries that ask for one.

    Args:
        device: that computes.
    """
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with listening(True):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def listening(is_one_machine: bool) -> Iterator[None]:
    """Inside, ranks of one machine listen on loopback, unless a person has chosen otherwise."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    added = [name for name in INTERFACES if name not in os.environ] if is_one_machine and loopback else []
    os.environ.update(dict.fromkeys(added, loopback or ""))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def open_group(
    backend: str, place: Place, device: torch.device, store: Store, exchange: Exchange, timeout_seconds: float
) -> None:
    """Open the group of all ranks of the run.

    Raises:
        LostRank: a rank did not come, or is gone; it is named.
        UserError: MPI numbers the ranks in another way.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if backend == "mpi":
            # it numbers the ranks itself, and takes no store
            dist.init_process_group("mpi", timeout=timeout)
        else:
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" and backend != "gloo" else None,
            )
            _let_hosts_end_first(dist.group.WORLD, timeout_seconds)
    except RuntimeError as error:
        raise exchange.explained(error, OPENING) from error
    if dist.get_rank() != place.rank:
        why = f"MPI counts this process as rank {dist.get_rank()}"
        raise UserError(f"RANK = {place.rank}", why, "mpirun sh -c 'RANK=$OMPI_COMM_WORLD_RANK paceline train ...'")


def new_group(ranks: Sequence[int], timeout_seconds: float) -> Any:
    """A group of these ranks, for which torch asks every rank of the run; those outside get a value that is none."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_seconds))
    _let_hosts_end_first(group, timeout_seconds)
    return group


def _let_hosts_end_first(group: Any, timeout_seconds: float) -> None:
    """Have NCCL give up later than the hosts, which know more; a rank that is not in the group has nothing of it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or torch.device("cuda") not in group._device_types:
        return
    backend = group._get_backend(torch.device("cuda"))
    if "NCCL" in type(backend).__name__:  # a torch without NCCL has no such class
        backend._set_default_timeout(timedelta(seconds=timeout_seconds + WATCHDOG_SECONDS))


def abort_group() -> None:
    """Take the group down after an error; unlike its orderly end this waits for no kernel, nor for other ranks."""
    if not dist.is_initialized():
        return

    def abort() -> None:
        # the error that is under way says more
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    # NCCL has been seen to hang in this too (NVIDIA/nccl issue 1013)
    thread = threading.Thread(target=abort, name=f"{IN_TORCH}abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
