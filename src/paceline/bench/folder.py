"""The folder of a bench: whose it is, the plan that its cells follow, and room on a disk that is full."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from paceline.bench.cells import empty
from paceline.bench.work import Extent, Source
from paceline.contract.errors import RunFolderError
from paceline.contract.files import disk_errors, write_atomically
from paceline.run_folder.lock import hold

CELLS, PLAN = "cells.jsonl", "bench.json"
NEEDS = ("contender", "status")
"""Fields of a cell, beside those that name it."""

OURS = {".lock", ".gitignore", "work", "cells", "caches", "contenders", CELLS}
"""What a bench has written before its plan is there."""


def take(folder: Path, held: contextlib.ExitStack) -> None:
    """Make the folder where it is not there, and keep every other bench out of it until ``held`` is closed.

    Raises:
        RunFolderError: it is no folder, holds something else, or is in use.
    """
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            raise RunFolderError(f"{folder}: not a folder", fix="choose another --out") from None
    there = {path.name for path in folder.iterdir()}
    if PLAN not in there and not there <= OURS:
        raise RunFolderError(
            f"{folder}: holds something else", "a bench has its folder to itself", "choose another --out"
        )
    hold(folder, held)


def make_room(folder: Path) -> None:
    """Remove what can be made again: caches, and weights that cells have saved."""
    shutil.rmtree(folder / "caches", ignore_errors=True)
    for cell in (folder / "cells").glob("*"):
        empty(cell)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan, with every field that is read of it; None where no cell was measured yet.

    Raises:
        RunFolderError: it is missing beside cells that followed it, or not whole.
    """
    path = folder / PLAN
    if not path.exists() and not (folder / CELLS).exists():
        return None
    try:
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # all that is read of it later
        Source(**plan["source"]), Extent(**plan["extent"])
        plan["asked"]["recipe"], plan["asked"]["steps"], plan["machine"]["cpu_count"], plan["paceline"]
        if isinstance(plan["repeats"], int) and isinstance(plan["fitted"], bool):
            return plan
        problem = "not whole"
    except FileNotFoundError:
        problem = "missing"
    except (ValueError, TypeError, KeyError):
        problem = "not whole"
    why = "it says what work the cells did; without it their figures stand for nothing"
    raise RunFolderError(f"{path}: {problem}", why, "choose another --out")


def write_plan(folder: Path, plan: dict[str, Any]) -> None:
    """So that a bench goes on with the same work."""
    write_atomically(folder / PLAN, json.dumps(plan, indent=2, ensure_ascii=False).encode())
