"""``paceline bench comm``: how fast ranks exchange data, so that a slow fabric is not blamed on the model.

Each collective is timed by itself, after a warm-up, one behind the other without pauses. The figure of a size is the
median of the rank that took longest. Sizes and the bus bandwidth are those of nccl-tests (NVIDIA/nccl-tests,
doc/PERFORMANCE.md): S bytes in t seconds on n ranks are S/t x 2(n-1)/n for all-reduce, and S/t x (n-1)/n for
all-gather and reduce-scatter, where S is what all ranks' parts make up together. That is the rate at which each rank
sends, whatever n is, and can be held against what its links carry in one direction. (Switches that add up on the way,
such as NVLink SHARP, can pass it.)

This room calls torch.distributed itself: the collectives are what it measures.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.contract.errors import UserError
from paceline.contract.files import disk_errors, write_atomically
from paceline.distributed.group import joined
from paceline.distributed.links import shared_link_rate
from paceline.machine.cluster import find_place
from paceline.machine.facts import this_machine
from paceline.observe.formats import size as sized
from paceline.seams import World

SMALLEST_BYTES = 2**10
"""Messages grow fourfold from here."""

LARGEST_BYTES = {"nccl": 2**28, "gloo": 2**24}
"""The largest message, where nothing else is asked for; above it the bandwidth stays what it is."""

ROW_SECONDS = 0.5
"""Time for one size of one collective."""

FEWEST, MOST = 5, 100
"""Number of timed calls a size."""

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective at one size."""

    operation: str
    backend: str
    device: str
    """The GPU's name, or ``cpu``."""
    ranks: int
    bytes: int
    """Size of the whole message: the tensor that is summed, or all ranks' parts together."""
    calls: int
    seconds: float
    """Median of the slowest rank."""
    bus_bytes_per_second: float
    link_bytes_per_second: float | None
    """What a rank's links carry in one direction; None where it is not known."""


@dataclass(frozen=True)
class Operation:
    """A collective, and the share of the message that each rank has to send."""

    name: str
    sends: Callable[[int], float]
    """Number of ranks -> bytes sent by each, in messages."""
    prepare: Callable[[Tensor, int, int], Callable[[], Any]]
    """Whole message, ranks, rank -> one call of it."""


def _prepare_all_gather(whole: Tensor, ranks: int, rank: int) -> Callable[[], Any]:
    # older releases of torch know it by its older name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    part = whole.chunk(ranks)[rank].clone()
    return lambda: gather(whole, part)


def _prepare_reduce_scatter(whole: Tensor, ranks: int, rank: int) -> Callable[[], Any]:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part = whole.chunk(ranks)[rank].clone()
    return lambda: scatter(part, whole)


OPERATIONS = (
    Operation("all-reduce", lambda n: 2 * (n - 1) / n, lambda whole, ranks, rank: lambda: dist.all_reduce(whole)),
    Operation("all-gather", lambda n: (n - 1) / n, _prepare_all_gather),
    Operation("reduce-scatter", lambda n: (n - 1) / n, _prepare_reduce_scatter),
)


def bench_comm(*, largest_bytes: int | None = None, out: Path | None = None) -> tuple[Measurement, ...]:
    """Measure between the ranks that this process is one of; rank 0 prints the tables.

    On GPUs NCCL is measured, and gloo beside it; on the CPU gloo.

    Args:
        largest_bytes: of a message; None: 256 MiB for NCCL, 16 MiB for gloo.
        out: file to write, a measurement a line; by rank 0.

    Raises:
        UserError: this process is no rank, or the ranks cannot join.
    """
    place = find_place(os.environ)
    if place.world_size == 1:
        why = "one process has nobody to exchange data with"
        alone = "paceline bench comm --gpus N, or --processes N"
        fix = "torchrun --nproc-per-node 2 -m paceline bench comm" if place.is_rank else alone
        raise UserError("bench comm: one rank", why, fix)
    device = torch.device("cuda", place.gpu) if torch.cuda.is_available() else torch.device("cpu")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out}", "it is a folder", f"--out {out / 'comm.jsonl'}")
    with joined(place, device=device, timeout_seconds=TIMEOUT_SECONDS) as world:
        found = measured(world, device, largest_bytes)
        if world.is_first:
            parts = itertools.groupby(found, key=lambda each: each.backend)
            sys.stdout.write("\n\n".join(table([*part]) for _, part in parts) + "\n")
            if out is not None:
                lines = "".join(json.dumps(asdict(each)) + "\n" for each in found)
                with disk_errors(out):
                    write_atomically(out, lines.encode())
        world.barrier("the figures are written")
    return found


def measured(world: World, device: torch.device, largest_bytes: int | None = None) -> tuple[Measurement, ...]:
    """Every collective at every size, through the open process group; the same on all ranks.

    Args:
        device: ``cuda``: NCCL there, then gloo on the CPU; ``cpu``: gloo.
    """
    facts = this_machine() if device.type == "cuda" else None
    places = [("nccl", device)] * (device.type == "cuda") + [("gloo", torch.device("cpu"))]
    found = []
    for backend, where in places:
        limit = shared_link_rate(world, facts) if facts is not None and backend == "nccl" else None
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
        for operation in OPERATIONS:
            for num_bytes in sizes(largest_bytes or LARGEST_BYTES[backend]):
                whole_bytes = max(num_bytes // (4 * world.size), 1) * 4 * world.size
                calls, seconds = _timed(operation, world, where, whole_bytes)
                found.append(
                    Measurement(
                        operation=operation.name,
                        backend=backend,
                        device=name,
                        ranks=world.size,
                        bytes=whole_bytes,
                        calls=calls,
                        seconds=seconds,
                        bus_bytes_per_second=whole_bytes * operation.sends(world.size) / seconds,
                        link_bytes_per_second=limit,
                    )
                )
    return tuple(found)


def sizes(largest_bytes: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB, ... up to ``largest_bytes``, which is the last."""
    growing = (SMALLEST_BYTES * 4**power for power in itertools.count())
    found = list(itertools.takewhile(lambda each: each < largest_bytes, growing))
    return [*found, largest_bytes]


def _timed(operation: Operation, world: World, device: torch.device, num_bytes: int) -> tuple[int, float]:
    """Number of calls, and the median seconds of one on the rank that took longest."""
    call = operation.prepare(torch.zeros(num_bytes // 4, device=device), world.size, world.rank)
    clock = _device_seconds if device.type == "cuda" else _host_seconds
    clock(call, 2)
    estimate = max(world.gather(statistics.median(clock(call, 3))))
    # all ranks make the same number of calls
    calls = int(min(MOST, max(FEWEST, ROW_SECONDS / estimate)))
    return calls, max(world.gather(statistics.median(clock(call, calls))))


def _host_seconds(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each call that returns when it is done."""
    found = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


def _device_seconds(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each call between events on the device; the host does not wait in between."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def table(found: Sequence[Measurement]) -> str:
    """One backend's figures: a line a size, for each collective microseconds, GB/s and the share of the link."""
    first = found[0]
    operations = list(dict.fromkeys(each.operation for each in found))
    limit = first.link_bytes_per_second
    columns = [("us", 10), ("GB/s", 9), *([("of link", 9)] if limit else [])]
    width = sum(each for _, each in columns)
    links = f"; the links of a rank carry {limit / 1e9:,.0f} GB/s each way" if limit else ""
    lines = [
        f"{first.backend}, {first.ranks} ranks, {first.device}: median time of the slowest rank, bus bandwidth{links}",
        " " * 10 + "".join(f"{name:>{width}}" for name in operations),
        " " * 10 + "".join(f"{name:>{each}}" for name, each in columns) * len(operations),
    ]
    for num_bytes in dict.fromkeys(each.bytes for each in found):
        cells = {each.operation: each for each in found if each.bytes == num_bytes}
        lines.append(f"{sized(num_bytes):<10}" + "".join(_cell(cells[name]) for name in operations))
    return "\n".join(lines)


def _cell(each: Measurement) -> str:
    rate = each.bus_bytes_per_second
    text = f"{each.seconds * 1e6:>10,.1f}{rate / 1e9:>9.2f}"
    return text + (f"{rate / each.link_bytes_per_second:>9.0%}" if each.link_bytes_per_second else "")
