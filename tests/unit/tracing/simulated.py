"""Steps of ranks with GPUs as they would be traced, simulated: every answer about them is known.

A host launches, a device works behind it, and collectives of all ranks end together. What a switch would do is
simulated too: the same steps without the fault are the truth that a prediction is held against.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COMPUTE, LINK, COPY = 7, 13, 17
"""Streams of a GPU."""
MAIN, AUTOGRAD = 100, 101
"""Threads of a host."""

MILLI, MICRO = 1e-3, 1e-6

MATMUL = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"
ATTENTION = "flash_fwd_kernel<Flash_fwd_kernel_traits>"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernel>"
BACK = "void at::native::vectorized_elementwise_kernel<4, GeluBackwardCUDAKernel>"
ADAM = "_adam_kernel"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY_IN = "Memcpy HtoD (Pinned -> Device)"


def nothing(rank: int, step: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step is made of; seconds. Functions are of rank and step."""

    world_size: int = 1
    num_steps: int = 10
    first_step: int = 91
    layers: int = 6
    matmul: float = 1.0 * MILLI
    attention: float = 0.3 * MILLI
    pointwise: tuple[float, ...] = (0.1 * MILLI,)
    """Kernels between two matrix products."""
    update: float = 0.5 * MILLI
    copy: float = 0.02 * MILLI
    launch: float = 5 * MICRO
    """The host's time for a launch."""
    loading: Callable[[int, int], float] = nothing
    in_forward: Callable[[int, int], float] = nothing
    compiling: Callable[[int, int], float] = nothing
    slowness: Callable[[int, int], float] = field(default=lambda rank, step: 1.0)
    """Factor of all kernels of a rank's step."""
    sum_seconds: float = 0.3 * MILLI
    """Of one of the gradients' buckets, over the link."""
    buckets: int = 4
    replayed: bool = False
    noise: float = 0.0
    """Relative spread of everything."""
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of window.json, for all ranks."""
    padding: float = 0.05
    slots: int = 16384


class Rank:
    """A host with its GPU."""

    def __init__(self, rank: int, load: Workload) -> None:
        self.rank, self.load, self.random = rank, load, random.Random(1000 * load.seed + rank)
        self.now = 0.0
        self.free = {COMPUTE: 0.0, LINK: 0.0, COPY: 0.0}
        self.events: list[dict[str, Any]] = []
        self.correlation = 0
        self.replay: int | None = None
        self.thread = MAIN
        self.slowness = 1.0

    def varied(self, seconds: float) -> float:
        return seconds * max(0.1, 1 + self.random.gauss(0, self.load.noise))

    def work(self, seconds: float) -> None:
        """The host does something."""
        self.now += self.varied(seconds)

    def event(self, kind: str, name: str, begin: float, seconds: float, thread: int, **arguments: Any) -> None:
        # Kineto counts microseconds from a base that is years ago
        times = {"ts": round(4.4744e12 + begin * 1e6, 3), "dur": round(seconds * 1e6, 3)}
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "pid": self.rank, "tid": thread, **times, "args": arguments}
        )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.now
        self.now += MICRO
        yield
        self.event("user_annotation", f"paceline: {name}", begin, self.now - begin, MAIN)
        # an annotation takes its time, which is what separates a launch after it from those inside
        self.now += MICRO

    def launch(self, name: str, seconds: float, stream: int = COMPUTE, kind: str = "kernel") -> float:
        """Begin work on the device; when it ends."""
        begun = self._launched()
        begin = max(self.free[stream], begun)
        seconds = self.varied(seconds) * (self.slowness if kind == "kernel" else 1.0)
        return self.ran(name, begin, begin + seconds, stream, kind)

    def ran(self, name: str, begin: float, end: float, stream: int, kind: str = "kernel") -> float:
        self.event(kind, name, begin, end - begin, stream, stream=stream, correlation=self.correlation)
        self.free[stream] = end
        return end

    def _launched(self) -> float:
        if self.replay is not None:
            self.correlation = self.replay
            return self.now
        self.correlation = self.next_correlation()
        begin = self.now
        self.work(self.load.launch)
        self.event(
            "cuda_runtime", "cudaLaunchKernel", begin, self.now - begin, self.thread, correlation=self.correlation
        )
        return self.now

    def next_correlation(self) -> int:
        return max((event["args"].get("correlation", 0) for event in self.events[-400:]), default=0) + 1

    @contextmanager
    def replaying(self) -> Iterator[None]:
        if not self.load.replayed:
            yield
            return
        self.replay = self.next_correlation()
        begin = self.now
        self.work(10 * MICRO)
        self.event("cuda_runtime", "cudaGraphLaunch", begin, self.now - begin, MAIN, correlation=self.replay)
        yield
        self.replay = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A span that comes only where its kernels are launched."""
        if self.load.replayed:
            yield
            return
        with self.span(name):
            yield

    def passes(self, step: int) -> list[float]:
        """Forward and backward; when each bucket is ready to be summed."""
        load, self.slowness = self.load, self.load.slowness(self.rank, step)
        ready = []
        with self.span("data wait"):
            self.work(30 * MICRO)
            self.work(load.loading(self.rank, step))
            with self.span("copy"):
                arrived = self.launch(COPY_IN, load.copy, COPY, "gpu_memcpy")
        self.free[COMPUTE] = max(self.free[COMPUTE], arrived)
        with self.replaying():
            with self.part("forward"):
                self.now += load.in_forward(self.rank, step)
                if seconds := load.compiling(self.rank, step):
                    self.event("cpu_op", "_compile.compile_inner (dynamo_timed)", self.now, seconds, MAIN)
                    self.now += seconds
                for _ in range(load.layers):
                    self.layer(POINTWISE, 1)
            with self.part("backward"):
                self.thread = AUTOGRAD
                for layer in range(load.layers):
                    self.layer(BACK, 2)
                    if (layer + 1) * load.buckets // load.layers > len(ready):
                        ready.append(self.free[COMPUTE])
                self.thread = MAIN
        return ready

    def layer(self, pointwise: str, times: int) -> None:
        if times == 1:
            self.launch(MATMUL, self.load.matmul)
            self.launch(ATTENTION, self.load.attention)
        for seconds in self.load.pointwise:
            self.launch(pointwise, seconds * times)
        if times == 2:
            self.launch(ATTENTION, 2 * self.load.attention)
            self.launch(MATMUL, 2 * self.load.matmul)

    def ends(self, summed: Sequence[tuple[float, float]]) -> None:
        """Wait for the sums, clip and update; ``summed``: when each began here and ended everywhere."""
        with self.span("communicate"):
            for begin, end in summed:
                self._launched()
                self.ran(ALL_REDUCE, begin, end, LINK)
                self.free[COMPUTE] = max(self.free[COMPUTE], end)
        with self.replaying():
            with self.part("clip"):
                self.launch("void at::native::reduce_kernel<512, 1>", self.load.update / 10)
            with self.part("update"):
                self.launch(ADAM, self.load.update)
        self.work(20 * MICRO)


def simulated(load: Workload) -> list[Rank]:
    """All ranks after all steps."""
    ranks = [Rank(rank, load) for rank in range(load.world_size)]
    for step in range(load.first_step, load.first_step + load.num_steps):
        begun, ready = [rank.now for rank in ranks], [rank.passes(step) for rank in ranks]
        summed: list[list[tuple[float, float]]] = [[] for _ in ranks]
        for bucket in range(load.buckets if load.world_size > 1 else 0):
            begins = [max(own[bucket], rank.free[LINK]) for rank, own in zip(ranks, ready, strict=True)]
            end = max(begins) + ranks[0].varied(load.sum_seconds)
            for rank, begin, sums in zip(ranks, begins, summed, strict=True):
                sums.append((begin, end))
                rank.free[LINK] = end
        for rank, begin, sums in zip(ranks, begun, summed, strict=True):
            rank.ends(sums)
            rank.event("user_annotation", f"paceline: step {step}", begin, rank.now - begin, MAIN)
            rank.now += 5 * MICRO
    for rank in ranks:
        rank.event("cuda_runtime", "cudaDeviceSynchronize", rank.now, 0.0, MAIN, correlation=0)
    return ranks


def seconds(load: Workload) -> float:
    """Of a mean step, once the device is busy."""
    few, many = replace(load, num_steps=2), replace(load, num_steps=12)
    ends = [max(max(rank.free.values()) for rank in simulated(each)) for each in (few, many)]
    return (ends[1] - ends[0]) / 10


SETTINGS = {
    **{f"techniques.{name}": False for name in ("packing", "capture", "compile", "fusion")},
    "techniques.precision": "bf16",
    "data.resident": False,
    "parallel.reduce_dtype": "fp32",
    "loop.micro_batch_size": None,
    "loop.batch_size": 32,
}


def facts_of(load: Workload, rank: int, **changes: Any) -> dict[str, Any]:
    """A rank's window.json."""
    last = load.first_step + load.num_steps - 1
    passes = 3 * load.layers * (load.matmul + load.attention)
    step = {"epoch": 2, "samples": 32, "slots": load.slots, "tokens": round(load.slots * (1 - load.padding))}
    facts = {
        "format": 1,
        "paceline": "0.1.0",
        "torch": "2.13.0",
        "kind": "kineto",
        "rank": rank,
        "world_size": load.world_size,
        "device": "NVIDIA H200",
        "first_step": load.first_step,
        "last_step": last,
        "graphs": "replayed" if load.replayed else "none",
        # half the peak while they run
        "steps": [{"step": n, **step, "flops": 0.5 * passes * 989e12} for n in range(load.first_step, last + 1)],
        "peak_flops": 989e12,
        "path": {"steps": "eager"},
        "settings": SETTINGS,
        "recompiles": [],
    }
    return facts | dict(load.facts) | changes


def write(folder: Path, load: Workload) -> Path:
    """A window's folder."""
    for rank in simulated(load):
        write_rank(folder, rank.rank, rank.events, facts_of(load, rank.rank))
    return folder


def write_rank(folder: Path, rank: int, events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trace = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": list(events), "traceName": "trace.json"}
    with gzip.open(folder / f"rank{rank}.trace.json.gz", "wt", compresslevel=1) as file:
        json.dump(trace, file)
    (folder / f"rank{rank}.window.json").write_text(json.dumps(facts))
