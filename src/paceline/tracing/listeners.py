"""Who listens while a window is open: torch's profiler, or Nsight Systems around the run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import torch

from paceline.contract.files import disk_errors
from paceline.contract.spans import Sink, listening
from paceline.observe.nvtx_ranges import nvtx_ranges
from paceline.observe.profiler_ranges import ProfilerRanges

SNAPSHOT_ENTRIES: Final = 1_000_000
"""Allocations that a snapshot remembers: some thousands a step."""


class Listener(ABC):
    """Records what happens between ``start`` and ``stop``; spans reach it in between."""

    kind: str

    @property
    @abstractmethod
    def remark(self) -> str:
        """What a person should know of it before; may be empty."""

    @abstractmethod
    def prepare(self) -> None:
        """Load and begin what takes its time; may be a step before ``start``, so that the first step is like others."""

    @abstractmethod
    def start(self) -> None:
        """From now on."""

    @abstractmethod
    def stop(self) -> None:
        """Until now; the device is idle."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was recorded; after ``stop``."""

    @abstractmethod
    def save(self, stem: Path) -> None:
        """Write what was recorded to files whose names begin with ``stem``.

        Raises:
            DiskFullError: no room.
            RunFolderError: the folder cannot be written.
        """


@final
class KinetoListener(Listener):
    """torch.profiler: the host's operators, the device's kernels, and spans as annotations, in one Chrome trace.

    Args:
        device: whose kernels are recorded, where it is a GPU.
        memory: record allocations too.
    """

    kind = "kineto"

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self._device, self._memory = device, memory
        self._profile: Any = None
        self._spans = contextlib.ExitStack()

    @property
    def remark(self) -> str:
        return ""

    def prepare(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # one profile a window: a second start of the same would forget the first
        self._profile = profile(activities=activities, profile_memory=self._memory, record_shapes=self._memory)
        with warnings.catch_warnings():
            # torch 2.11 says so at the first start too; its way out, acc_events, reads every event when a window closes
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profile.prepare_trace()

    def start(self) -> None:
        if self._snapshots:
            # with frames of C++ torch starts a process for each library, which outlive the run's use of them
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=SNAPSHOT_ENTRIES, device=self._device)
        self._profile.start_trace()
        self._spans.enter_context(listening(ProfilerRanges()))

    def stop(self) -> None:
        self._spans.close()
        self._profile.stop_trace()

    def save(self, stem: Path) -> None:
        trace = stem.with_name(f"{stem.name}.trace.json.gz")
        with disk_errors(trace):
            with _in_place_of(trace) as unfinished:
                plain = unfinished.with_suffix("")
                self._profile.export_chrome_trace(str(plain))
                if self._memory:
                    add_memory_counters(plain)
                # by ourselves: torch compresses at the highest level, which takes five times as long for a tenth less
                with plain.open("rb") as file, gzip.open(unfinished, "wb", compresslevel=3) as compressed:
                    shutil.copyfileobj(file, compressed, 2**20)
            if self._snapshots:
                with _in_place_of(stem.with_name(f"{stem.name}.memory.pickle")) as unfinished:
                    torch.cuda.memory._dump_snapshot(str(unfinished))
        self.discard()

    def discard(self) -> None:
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    @property
    def _snapshots(self) -> bool:
        return self._memory and self._device.type == "cuda"


@final
class NsysListener(Listener):
    """cudaProfilerStart and cudaProfilerStop, between which ``nsys profile --capture-range=cudaProfilerApi`` records.

    The ranges stand in its report as a hand-written loop would have them: ``Epoch 3, Iteration 91`` around
    ``Forward``, ``Backward`` and ``Optimizer Step``. Without a GPU there is nothing to start, and ranges still reach
    whatever tool listens.

    Args:
        device: the run's.
        iteration: step of the run -> epoch and iteration of it, both from 1.
    """

    kind = "nsys"

    def __init__(self, device: torch.device, iteration: Callable[[int], tuple[int, int]]) -> None:
        self._device, self._iteration = device, iteration
        # before training, so that a package that is missing is told of at once
        self._ranges: Sink = nvtx_ranges(self._title)
        self._spans = contextlib.ExitStack()

    @property
    def remark(self) -> str:
        if self._device.type == "cuda":
            return ""
        return "there is no GPU whose profiler could be started: the ranges reach whatever tool listens all along"

    def prepare(self) -> None:
        pass

    def start(self) -> None:
        if self._device.type == "cuda":
            cudart: Any = torch.cuda.cudart()
            cudart.cudaProfilerStart()
        self._spans.enter_context(listening(self._ranges))

    def stop(self) -> None:
        self._spans.close()
        if self._device.type == "cuda":
            cudart: Any = torch.cuda.cudart()
            cudart.cudaProfilerStop()

    def discard(self) -> None:
        pass

    def save(self, stem: Path) -> None:
        pass

    def _title(self, name: str, step: int | None) -> str:
        if name == "step" and step is not None:
            return "Epoch {}, Iteration {}".format(*self._iteration(step))
        return "Optimizer Step" if name == "update" else name.title()


def add_memory_counters(path: Path) -> None:
    """Give a Chrome trace with allocations a curve of them: one counter a device, in bytes.

    torch writes each allocation as an instant of its own (``[memory]``), which viewers list and do not draw.
    """
    trace = json.loads(path.read_bytes())
    counters = []
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        said = event["args"]
        device = "host" if said["Device Type"] == 0 else f"device {said['Device Id']}"
        sizes = {"allocated": said["Total Allocated"], "reserved": said["Total Reserved"]}
        counters.append(
            {"ph": "C", "name": f"memory of {device}", "pid": event["pid"], "ts": event["ts"], "args": sizes}
        )
    trace["traceEvents"] += counters
    path.write_text(json.dumps(trace), encoding="utf-8")


@contextlib.contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """A name beside ``path`` with its ending, for who writes a file by name; takes the place of ``path`` when done."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        os.replace(unfinished, path)
