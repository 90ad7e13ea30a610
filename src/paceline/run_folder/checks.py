"""Which folders a run may have: what is in it is looked at before anything is written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from paceline.contract.errors import RunFolderError
from paceline.contract.files import is_irregular, is_utf8
from paceline.run_folder.ways import has_checkpoint, way_on

LOCK, QUARANTINE = ".lock", "quarantine.jsonl"
FILES = (
    "recipe.yaml",
    "manifest.json",
    "metrics.jsonl",
    "summary.json",
    "preempted",
    "report.html",
    QUARANTINE,
    LOCK,
)

BEFORE_STEPS = {"recipe.yaml", "manifest.json", "metrics.jsonl", QUARANTINE, "checkpoints", "tensorboard"}
"""What a run has left before its first step."""


def resolved(path: str | Path) -> Path:
    """The path without links.

    Raises:
        RunFolderError: it is a link that leads nowhere.
    """
    path = Path(path)
    if path.is_symlink() and not path.exists():
        raise RunFolderError(f"{path}: is a link that leads nowhere", fix="remove it, or choose another --out")
    return path.resolve()


def require_utf8(path: Path) -> None:
    """Refuse to write a run into a folder whose name is not UTF-8: the libraries that save its model take no such path.

    Raises:
        RunFolderError: says so, before the run begins.
    """
    if is_utf8(path):
        return
    why = "the libraries that save the model take no other path"
    raise RunFolderError(f"{path}: is not UTF-8", why, "rename the folder, or choose another --out")


def require_files(path: Path) -> None:
    """Refuse a run folder with a folder or a pipe where a file belongs.

    Raises:
        RunFolderError: names it.
    """
    for name in FILES:
        if is_irregular(path / name):
            raise RunFolderError(
                f"{path / name}: is no regular file", "a file of the run belongs there", "put it back, or remove that"
            )


def require_writable(path: Path) -> None:
    """Refuse a run folder that is to be written where it is, and cannot be.

    Raises:
        RunFolderError: says so.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        fix = f"chmod u+w {shlex.quote(str(path))}, or work on a copy: cp -r {shlex.quote(str(path))} COPY"
        raise RunFolderError(f"{path}: cannot be written", "it is read-only, or not yours", fix)


def is_unbegun(path: Path) -> bool:
    """Whether all that is there is a run without a step, which was stopped, or failed, while it compiled for one."""
    if not (path / "recipe.yaml").is_file() or has_checkpoint(path):
        return False
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    if not names <= BEFORE_STEPS or any((path / name).is_symlink() for name in names):
        return False
    metrics = path / "metrics.jsonl"
    return not metrics.exists() or b'"kind": "step"' not in metrics.read_bytes()


def require_fresh(path: Path) -> None:
    """Refuse a folder with anything in it but what a run that failed before its first step leaves behind.

    Raises:
        RunFolderError: a run, or something else, is in it.
    """
    # a run that was killed while it wrote its first file leaves that under another name, see files.replacing
    if is_unbegun(path):
        return
    names = sorted(name for name in set(os.listdir(path)) - {LOCK, QUARANTINE} if not name.startswith(".recipe.yaml."))
    if "recipe.yaml" in names or "manifest.json" in names:
        raise RunFolderError(
            f"{path}: already holds a run",
            "a new run would overwrite it",
            f"{way_on(path)}; or choose another --out",
        )
    if names:
        raise RunFolderError(
            f"{path}: not empty", f"it holds {names[0]!r} and is no run folder", "choose another --out"
        )


def refuse_links(path: Path) -> None:
    """model/ and checkpoints/ may be links to a larger disk; a file that we write to may not lead elsewhere.

    Raises:
        RunFolderError: one of its files is a link, or no file.
    """
    for name in FILES:
        if (path / name).is_symlink():
            raise RunFolderError(
                f"{path / name}: is a link", "paceline writes only inside the run folder", "put a copy in its place"
            )
    require_files(path)
