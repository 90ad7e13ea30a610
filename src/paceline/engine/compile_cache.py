"""Compiled kernels that are kept from run to run, and notes of what has been compiled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.contract.files import write_atomically
from paceline.seams import Build

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where torch and triton keep compiled kernels; a user who sets the first has chosen."""


@contextlib.contextmanager
def kept_cache(folder: Path) -> Iterator[None]:
    """Compiled kernels are looked up in and written to ``folder`` while inside, unless the user chose a place.

    torch's own caches of graphs (FX graph cache, AOTAutograd cache) are on by default and live there, so that the next
    run compiles nothing. torch reads pickles from it: it is as private as the code itself, and made for its owner only.
    """
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    if _is_wished(before["TORCHINDUCTOR_CACHE_DIR"]):
        yield
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_kept(build: Build, folder: Path) -> bool:
    """Whether ``note_kept`` was called for the same blocks, torch and device: a guess that steers an estimate only."""
    return _mark_of(build, folder).exists()


def note_kept(build: Build, folder: Path) -> None:
    """Remember that the build's blocks have been compiled into ``folder``."""
    write_atomically(_mark_of(build, folder), b"")


def _is_wished(place: str | None) -> bool:
    """Whether a user chose the place; torch writes its own choice into the variable too."""
    if place is None or "torch._inductor" not in sys.modules:
        return place is not None  # torch has had no occasion to write it; and nobody waits for the compiler's import
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return place != default_cache_dir()


def _mark_of(build: Build, folder: Path) -> Path:
    device = torch.cuda.get_device_name(build.device) if build.device.type == "cuda" else build.device.type
    modules = sorted({repr(module) for module in build.blocks or (build.model,)})
    said = json.dumps([torch.__version__, device, type(build.layout).__name__, modules])
    return folder / f"paceline-{hashlib.sha256(said.encode()).hexdigest()[:16]}.mark"
