"""What a GPU and its libraries take beside torch's tensors: measured once a kind of GPU, and kept in a small file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from paceline.contract.errors import UserError
from paceline.contract.files import cache_folder
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
    communicator: int | None
    """Taken by NCCL beside it, where ranks exchange anything; None: not measured on this GPU."""
    workspaces: tuple[int, ...]
    """Kept by matrix products from the first on, from the allocator's pool that they compute in: cuBLAS's, one for each
    thread, that of the forward and that of the backward pass."""

    def workspace(self, *, beside: bool) -> int:
        """The workspace of the thread that launches, or of the backward pass's own beside it; 0 where that one has
        none."""
        return self.workspaces[beside] if beside < len(self.workspaces) else 0


def measured_file() -> Path:
    """Where ``paceline calibrate`` keeps what it measured on this machine."""
    return cache_folder() / "cards.json"


def constants_for(gpu: Gpu) -> Constants:
    """Those measured on this machine; else those known of this kind of GPU, or of its generation.

    Raises:
        UserError: the file of this machine's constants is none.
    """
    shipped = json.loads((files("paceline.memory") / "constants.json").read_text(encoding="utf-8"))
    near = shipped[MEASURED if (gpu.compute_capability or (0, 0)) >= (9, 0) else "older"]
    have = _measured_here().get(gpu.name) or shipped.get(gpu.name)
    source = near["source"] if have is None else have["source"]
    if have is None and near is shipped[MEASURED]:
        source = f"not measured on this GPU: those {source}"
    have = have or near
    # with one GPU nobody could measure what two exchange through
    communicator = have.get("communicator", near["communicator"])
    return Constants(
        source=source, context=have["context"], communicator=communicator, workspaces=tuple(have["workspaces"])
    )


def _measured_here() -> dict[str, Any]:
    file = measured_file()
    if not file.is_file():
        return {}
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        for entry in told.values():
            entry["context"] + sum(entry["workspaces"]) + len(entry["source"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        why = "it is not what paceline calibrate writes"
        raise UserError(f"{file} cannot be read", why, f"rm {file}, then paceline calibrate") from None
    return dict(told)
