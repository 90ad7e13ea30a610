"""What a killed run was still writing: files and folders under names that only the next run in the folder removes."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from paceline.run_folder.checks import FILES

_FILE = re.compile(rf"\.(?:{'|'.join(map(re.escape, FILES))})\.[0-9a-f]{{8}}")
"""As ``paceline.contract.files.replacing`` names them."""

_MODEL = re.compile(r"\.model\.(?!previous$)[a-z0-9_]{8}")
"""As ``paceline.models.saved.save_model`` names them. ``.model.previous`` it puts back, or removes, by itself."""

_TRACE = ".unfinished-"
"""Begins the names of ``paceline.tracing.listeners``."""


def sweep(path: Path) -> None:
    """Remove what a killed process left half-written. To be called by who holds the folder: nobody writes there now."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if _FILE.fullmatch(entry.name) or _MODEL.fullmatch(entry.name)]
    traces = path / "trace"
    if traces.is_dir() and not traces.is_symlink():
        names += [str(found.relative_to(path)) for found in traces.rglob(f"{_TRACE}*")]
    for name in names:
        _remove(path / name)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{path}: cannot be removed yet: {error.strerror}", stacklevel=3)
