"""Sums over the GPUs of one machine in which copy engines carry the bytes, so that no multiprocessor waits for a link.

    torchrun --standalone --nproc-per-node 4 benchmarks/sums_by_copies.py --out FILE.jsonl
    torchrun --standalone --nproc-per-node 2 benchmarks/sums_by_copies.py --one-gpu    # are the sums right? no rates

NCCL's kernels hold up to 24 of 132 multiprocessors while they sum, and matrix products beside them take another round
(sums_h200_2026-11-22.md). Here each rank fetches its share of what the others have (a copy a peer), adds it up, and
fetches the other shares when their ranks are done: the bytes of a ring, and the same bits on all ranks. What computes
is the adding alone. ``sums_beside_backward.py --variant copies=1`` puts it beside a backward pass.

Source of the method: torch.distributed._symmetric_memory, whose _low_contention_* collectives travel in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

MIB = 2**20
ALIGNED = 16
"""Bytes that a share is a multiple of, for copies and vector loads."""
CHECKED = (1, 16, 1024, 1_000_003)
"""Elements; what the ranks' number does not divide too."""
_READABLE: set[int] = set()
"""Where the memory begins that ``zeros`` made: torch 2.11 has no way to ask."""


class Copies:
    """Sums in place of stretches of buffers that all ranks can read.

    Args:
        group: of the ranks, all on one machine.
        device: of this rank.
        first: what adds up and waits goes before other kernels that wait.
    """

    def __init__(self, group: Any, device: torch.device, *, first: bool = False) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self._stream = torch.cuda.Stream(device, priority=-1 if first else 0)
        self._handles: dict[int, Any] = {}
        self._fetched: dict[torch.dtype, Tensor] = {}

    def reaches(self, tensor: Tensor) -> bool:
        """Whether the tensor is in memory that ``zeros`` made."""
        return tensor.untyped_storage().data_ptr() in _READABLE

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin the sum behind what the current stream has to do; what is returned makes the current stream wait.

        The same stretch of the same buffer on all ranks, in one order. A buffer's first sum is collective on the host.
        """
        handle = self._handle(tensor)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._sum(tensor, handle)
            ended = torch.cuda.Event()
            ended.record()
        return lambda: torch.cuda.current_stream().wait_event(ended)

    def _sum(self, tensor: Tensor, handle: Any) -> None:
        unit = ALIGNED // tensor.element_size()
        share = -(-tensor.numel() // (self._size * unit)) * unit
        mine = tensor[self._rank * share : (self._rank + 1) * share]
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        room = self._room(tensor.dtype, share * len(others)).view(len(others), share)
        handle.barrier()  # all have what is to be summed
        if mine.numel():
            for row, peer in zip(room, others, strict=True):
                row[: mine.numel()].copy_(self._of(handle, peer, mine))
            for row in room:
                mine += row[: mine.numel()]
        handle.barrier()  # all shares are summed, and nobody reads the summands any more
        for peer in others:
            theirs = tensor[peer * share : (peer + 1) * share]
            if theirs.numel():
                theirs.copy_(self._of(handle, peer, theirs))
        handle.barrier()  # nobody reads this rank's share any more

    def _of(self, handle: Any, peer: int, stretch: Tensor) -> Tensor:
        """The same stretch of a peer's buffer."""
        return handle.get_buffer(peer, stretch.shape, stretch.dtype, stretch.storage_offset())

    def _handle(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._handles:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._handles[storage.data_ptr()] = symmetric.rendezvous(whole, self._group)
        return self._handles[storage.data_ptr()]

    def _room(self, dtype: torch.dtype, size: int) -> Tensor:
        if dtype not in self._fetched or self._fetched[dtype].numel() < size:
            # work that is under way may still use the smaller one
            torch.cuda.synchronize()
            self._fetched[dtype] = torch.empty(size, dtype=dtype, device=self._stream.device)
        return self._fetched[dtype][:size]


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-d, in memory that other ranks can read."""
    made = symmetric.empty(size, dtype=dtype, device=device).zero_()
    _READABLE.add(made.untyped_storage().data_ptr())
    return made


def check(copies: Copies, device: torch.device) -> None:
    """Sums of numbers that every order of additions adds up to the same, and of others on all ranks alike."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in CHECKED:
        buffer = zeros(size + 64, torch.float32, device)
        stretch = buffer[64:]
        for round_ in range(3):
            ramp = torch.arange(size, device=device, dtype=torch.float32) % 1000
            stretch.copy_(ramp * (rank + 1 + round_))
            copies.start_all_reduce(stretch)()
            expected = ramp * sum(other + 1 + round_ for other in range(ranks))
            if not torch.equal(stretch, expected) or buffer[:64].any():
                raise SystemExit(f"rank {rank}: wrong sum of {size} elements, round {round_}")
        generator = torch.Generator(device).manual_seed(rank)
        stretch.normal_(generator=generator)
        copies.start_all_reduce(stretch)()
        digests: list[Any] = [None] * ranks
        dist.all_gather_object(digests, float(stretch.double().sum()))
        if len(set(digests)) != 1:
            raise SystemExit(f"ranks have different sums of {size} elements: {digests}")


def milliseconds(call: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        call()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU: checks, no rates")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0 if chosen.one_gpu else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if chosen.one_gpu else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    copies = Copies(dist.group.WORLD, device)
    check(copies, device)
    for mib in () if chosen.one_gpu else (1, 25, 90, 256):
        buffer = zeros(mib * MIB // 4, torch.float32, device)
        travels = buffer.nbytes * 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        for name, call in {
            "copies": lambda buffer=buffer: copies.start_all_reduce(buffer)(),
            "nccl": lambda buffer=buffer: dist.all_reduce(buffer),
        }.items():
            taken = milliseconds(call)
            record = {"sums": name, "mib": mib, "ranks": dist.get_world_size(), "ms": round(taken, 4)}
            record |= {"bus_gb_per_second": round(travels / taken / 1e6, 1), "torch": torch.__version__}
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
                if chosen.out:
                    with chosen.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
    if dist.get_rank() == 0:
        print("sums are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
