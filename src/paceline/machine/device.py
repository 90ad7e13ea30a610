"""What is asked of a device: the host, a GPU, or one that is only planned with.

``plan`` computes a run's steps on a device that is not there, with tensors that hold nothing (``memory/stand_in.py``).
Everything that is chosen by the GPU it runs on asks here, so that the steps planned are those that will be run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from paceline.machine.facts import Gpu

PLANNED: Final = "planned"
"""Type of the device that stands in for a GPU. Kernels of our own count as there, whatever is installed here."""

_planned: Gpu | None = None

_stream_names: dict[int, str] = {}


def plan_with(gpu: Gpu) -> None:
    """From now on the device type ``planned`` stands in for this GPU."""
    global _planned
    _planned = gpu


def is_gpu(device: torch.device) -> bool:
    """Whether this is a GPU, or stands in for one."""
    return device.type in ("cuda", PLANNED)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU: (9, 0) for Hopper; of a planned one that is not known, (0, 0)."""
    if device.type == PLANNED and _planned is not None:
        return _planned.compute_capability or (0, 0)
    return torch.cuda.get_device_capability(device)


def gpu_name(device: torch.device) -> str:
    """As its driver writes it, for example ``NVIDIA H200``."""
    if device.type == PLANNED and _planned is not None:
        return _planned.name
    return torch.cuda.get_device_name(device)


def memory_bytes(device: torch.device) -> int:
    """All of a GPU's memory."""
    if device.type == PLANNED and _planned is not None:
        return _planned.memory_bytes or 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def named_stream(device: torch.device, name: str) -> Any:
    """A stream of a GPU, which tools show under this name."""
    stream = torch.get_device_module(device).Stream(device)
    if device.type == "cuda":
        _stream_names[stream.cuda_stream] = name
    return stream


def stream_names() -> Mapping[int, str]:
    """Handle (``cudaStream_t`` as a number) -> name, of this process's streams that have one."""
    return MappingProxyType(_stream_names)


@contextlib.contextmanager
def matmul_precision(mode: str) -> Iterator[None]:
    """fp32 matrix products and convolutions in TF32 (``tf32``) or in full (``fp32``) while inside.

    The setting is the process's, so it covers the backward pass too; it is put back on the way out.
    """
    wanted = {"tf32": "tf32", "fp32": "ieee"}.get(mode)
    places: tuple[Any, ...] = _precision_holders() if wanted else ()
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = wanted
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _precision_holders() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
