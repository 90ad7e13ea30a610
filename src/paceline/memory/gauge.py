"""What a GPU holds at this moment, read when all work on it is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Bytes, as of ``StageRecord``; the highest are those since the reading before."""

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    in_use: int = 0

    def after(self, before: Reading | None) -> Reading:
        """This reading of a stage that the earlier one is of too: the last of its ends, the highest of its heights."""
        if before is None:
            return self
        return Reading(
            allocated=self.allocated,
            peak=max(self.peak, before.peak),
            reserved=max(self.reserved, before.reserved),
            in_use=max(self.in_use, before.in_use),
        )


def taken_at_most(device: torch.device) -> int:
    """Bytes that were taken from the GPU when most was reserved: what has been given back since then, too."""
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)


class Gauge(ABC):
    """Reads the memory of a device."""

    @abstractmethod
    def read(self) -> Reading:
        """Wait until the device has nothing left to do, then read it. Heights are counted anew from here."""


@final
class GpuGauge(Gauge):
    """Reads a GPU's memory: by torch's allocator, and by the driver, whose count is what nvidia-smi shows.

    Args:
        device: the GPU.
        others: bytes that other programs have taken of it, which are left out.
    """

    def __init__(self, device: torch.device, others: int = 0) -> None:
        self._device, self._others = device, others

    def read(self) -> Reading:
        device = self._device
        torch.cuda.synchronize(device)
        reserved = torch.cuda.max_memory_reserved(device)
        found = Reading(
            allocated=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            reserved=reserved,
            in_use=max(taken_at_most(device) - self._others, reserved),
        )
        torch.cuda.reset_peak_memory_stats(device)
        return found


@final
class NoGauge(Gauge):
    """Stands in for a device that counts nothing, as a CPU."""

    def read(self) -> Reading:
        return Reading()
