"""What a GPU and its libraries take beside torch's tensors: measured once a kind of GPU, and kept in a small file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from paceline.machine.facts import Gpu

MEASURED: Final = "NVIDIA H200"
"""Whose constants stand for those of later GPUs too."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What runs take beside their tensors, on one kind of GPU under one build of torch. Sizes in bytes."""

    source: str
    """Where they come from, for people."""
    context: int
    """What of the GPU's memory is gone before torch's allocator reserves anything: the driver's context, and the code
    of the kernels that a step loads."""
    communicator: int
    """Taken by NCCL beside it, where ranks exchange anything."""
    workspaces: tuple[int, ...]
    """Kept by matrix products from the first on, from the allocator's pool that they compute in: cuBLAS's, one for each
    thread, that of the forward and that of the backward pass."""

    def workspace(self, *, beside: bool) -> int:
        """The workspace of the thread that launches, or of the backward pass's own beside it; 0 where that one has
        none."""
        return self.workspaces[beside] if beside < len(self.workspaces) else 0


def constants_for(gpu: Gpu) -> Constants:
    """Return those of this kind of GPU, or of its generation."""
    shipped = json.loads((files("paceline.memory") / "constants.json").read_text(encoding="utf-8"))
    near = shipped[MEASURED if (gpu.compute_capability or (0, 0)) >= (9, 0) else "older"]
    have = shipped.get(gpu.name)
    source = near["source"] if have is None else have["source"]
    if have is None and near is shipped[MEASURED]:
        source = f"not measured on this GPU: those {source}"
    have = have or near
    return Constants(
        source=source,
        context=have["context"],
        communicator=have["communicator"],
        workspaces=tuple(have["workspaces"]),
    )
