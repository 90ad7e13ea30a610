"""This machine as plain facts: processors, memory, GPUs, installed versions. Nothing here needs torch.

What cannot be found out is None, never a guess: whoever reads a fact decides what not knowing means.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline._version import __version__
from paceline.contract.plain import FORMERLY, plain

PACKAGES = (
    "paceline",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "scikit-learn",
    "triton",
    "datasets",
    "pyarrow",
    "pandas",
    "pillow",
    "tensorboard",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "peft",
)
"""Distributions whose versions are recorded."""

NVIDIA_SMI_SECONDS = 20.0
"""A GPU with a wedged driver makes nvidia-smi hang; a healthy one answers in about a second even without
persistence mode."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA major version -> oldest driver branch that runs it (Linux, minor version compatibility).
Source: NVIDIA, CUDA Compatibility, table 'CUDA Toolkit and Minimum Required Driver Version'."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    """As nvidia-smi writes it, for example ``NVIDIA H200``."""
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    """(9, 0) for Hopper."""
    driver: str | None = None
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about the machine that this process runs on."""

    python: str
    platform: str
    cpu_model: str | None
    cpu_count: int
    """Processors that this process may use: its affinity, cut to its control group's quota."""
    memory_bytes: int | None
    """Main memory that this process may use: the machine's, cut to its control group's limit."""
    gpus: tuple[Gpu, ...] = field(default=(), metadata={FORMERLY: "cards"})
    """GPUs that this process may use (CUDA_VISIBLE_DEVICES), in nvidia-smi's order."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Distribution -> version; None when it is not installed."""
    torch_cuda: str | None = None
    """CUDA version that the installed torch was built for; None for a CPU build or without torch."""
    in_slurm: bool = False

    @property
    def cuda_problem(self) -> str | None:
        """Why no GPU can be used here, or None when one can."""
        torch = self.versions.get("torch")
        if not self.gpus:
            return "no NVIDIA GPU is visible to this process"
        if torch is None:
            return "torch is not installed"
        if self.torch_cuda is None:
            return f"the installed torch {torch} is a build without CUDA"
        oldest, driver = OLDEST_DRIVER.get(int(self.torch_cuda.split(".")[0])), self.gpus[0].driver
        if oldest and driver and driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < oldest:
            return f"driver {driver} is too old for torch's CUDA {self.torch_cuda}, which needs {oldest} or newer"
        return None

    def plain(self) -> dict[str, Any]:
        """Nested plain data for manifests."""
        told: dict[str, Any] = plain(self)
        return told


def this_machine() -> Facts:
    """The facts of the machine and the environment that this process runs in; takes about as long as nvidia-smi."""
    versions = {name: version_of(name) for name in PACKAGES}
    return Facts(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_model=_cpu_model(Path("/proc/cpuinfo")),
        cpu_count=_cpu_count(),
        memory_bytes=main_memory_bytes(),
        gpus=visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        versions=versions,
        torch_cuda=_torch_cuda() if versions["torch"] else None,
        in_slurm="SLURM_JOB_ID" in os.environ,
    )


def visible(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The ``gpus`` that CUDA_VISIBLE_DEVICES=``setting`` leaves; like CUDA, it stops at the first unknown entry.

    A slice of a GPU (``MIG-...``) is listed as its GPU with unknown memory.
    """
    if setting is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-") and len({gpu.name for gpu in gpus}) == 1:
            chosen.append(replace(gpus[0], memory_bytes=None, uuid=entry))
        elif entry.isdecimal() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry.startswith("GPU-") and (named := [c for c in gpus if c.uuid and c.uuid.startswith(entry)]):
            chosen.append(named[0])
        else:
            break
    return tuple(chosen)


def ask(command: Sequence[str], seconds: float = NVIDIA_SMI_SECONDS) -> str | None:
    """What ``command`` prints; None when it is missing, fails or takes longer than ``seconds``."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus() -> tuple[Gpu, ...]:
    answer = ask(
        ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version,uuid", "--format=csv,noheader"]
    )
    if answer is not None:
        return parse_gpus(answer)
    # containers may bring the driver without its tools; the kernel module still lists the GPUs
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"^Model:\s*(.+?)\s*$", _read(file) or "", re.MULTILINE) for file in files]
    return tuple(Gpu(name=model[1]) for model in models if model)


def parse_gpus(answer: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's CSV (name, memory.total, compute_cap, driver_version, uuid; no header)."""
    gpus = []
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        if len(row) != 5:  # 'No devices were found'
            continue
        name, memory, capability, driver, uuid = (cell.strip() for cell in row)
        mebibytes, version = re.match(r"(\d+) MiB$", memory), re.match(r"(\d+)\.(\d+)$", capability)
        gpus.append(
            Gpu(
                name=name,
                memory_bytes=int(mebibytes[1]) * 2**20 if mebibytes else None,
                compute_capability=(int(version[1]), int(version[2])) if version else None,
                driver=driver if re.match(r"\d", driver) else None,
                uuid=uuid if uuid.startswith("GPU-") else None,
            )
        )
    return tuple(gpus)


def version_of(distribution: str) -> str | None:
    """The installed version; None where there is none. paceline's own also where it runs from its source."""
    if distribution == "paceline":
        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Read from torch's version.py as text: importing torch would cost seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _read(Path(spec.origin).parent / "version.py") or ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _cpu_model(cpuinfo: Path) -> str | None:
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", _read(cpuinfo) or "", re.MULTILINE)
    return found[1] if found else platform.processor() or None


def _cpu_count() -> int:
    if sys.platform == "linux":
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    quota = cpu_quota(_control_group_file("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
    return max(1, min(usable, math.ceil(quota))) if quota else usable


def cpu_quota(limit: str | None) -> float | None:
    """Processors in a control group's ``QUOTA PERIOD`` (microseconds); None without a quota."""
    quota, _, period = (limit or "").partition(" ")
    if not (quota.isdecimal() and period.strip().isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def main_memory_bytes() -> int | None:
    """Main memory that this process may use: the machine's, cut to its control group's limit; None where unknown."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(Path("/proc/meminfo")) or "", re.MULTILINE)
    total = int(found[1]) * 1024 if found else None
    limit = _control_group_file("memory.max", "memory/memory.limit_in_bytes")
    limits = [int(limit)] if limit and limit.isdecimal() else []
    return min([total, *limits]) if total else None


def beyond_main_memory(num_bytes: int) -> str:
    """Sentence that so many bytes are more than this process may use; empty where they are not, or nothing is known."""
    total = main_memory_bytes()
    if total is None or num_bytes <= total:
        return ""
    return f"that takes {num_bytes / 2**30:,.1f} GiB of main memory, and there are {total / 2**30:,.1f}"


def _control_group_file(current: str, *older: str) -> str | None:
    """A limit of this process's control group: version 2's file, or version 1's joined by spaces."""
    root = Path("/sys/fs/cgroup")
    own = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")) or "", re.MULTILINE)
    for folder in (root / own[1] if own else root, root):
        if text := _read(folder / current):
            return text.strip()
    texts = [_read(root / name) for name in older]
    return " ".join(text.strip() for text in texts if text) if all(texts) else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
