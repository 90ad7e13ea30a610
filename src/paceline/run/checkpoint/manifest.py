"""What a checkpoint folder must be, and whether it still is: names, manifest, marker and checksums. Torch-free.

Everything here treats the folder as a stranger's: links, pipes and names that lead elsewhere are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.contract.errors import CheckpointError

FORMAT_VERSION = 1

STATE, MANIFEST, MARKER = "state.json", "manifest.json", "COMMITTED"
REQUIRED = (STATE, "model.safetensors")
"""What every checkpoint has, whatever its manifest says."""

FILE_NAME = r"^([A-Za-z0-9_-]+\.safetensors|state\.json)$"


@dataclass(frozen=True, order=True)
class Slot:
    """Where a checkpoint is kept: an edition, from 1, of a step."""

    step: int
    edition: int = 1

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"step-{self.step:08d}" + (f".{self.edition}" if self.edition > 1 else "")

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The slot of a folder's name; None for every other name."""
        match = re.fullmatch(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?", name)
        slot = cls(int(match[1]), int(match[2] or 1)) if match else None
        return slot if slot and slot.name == name else None


class Entry(BaseModel):
    """A file of a checkpoint as it was when saved."""

    model_config = ConfigDict(frozen=True)
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """manifest.json; names that could lead out of the folder are not valid."""

    model_config = ConfigDict(frozen=True)
    format: Literal["paceline checkpoint"]
    version: int
    step: int
    is_best: bool
    files: dict[Annotated[str, Field(pattern=FILE_NAME)], Entry]


class DamagedError(Exception):
    """A checkpoint that is not what was saved; ``problems`` are ``folder/file: reason``."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def is_committed(root: Path, slot: Slot) -> bool:
    """Whether the marker is there, sound or not: without it, the save never ended."""
    return os.path.lexists(root / slot.name / MARKER)


def slots_of(folder: Path) -> list[Slot]:
    """Folders that are named as checkpoints, ascending; links are none."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sorted(
            slot for entry in entries if (slot := Slot.parse(entry.name)) and entry.is_dir(follow_symlinks=False)
        )
    return []


def verify(root: Path, slot: Slot) -> tuple[Manifest, dict[str, Any]]:
    """The manifest and the state of a committed checkpoint, every byte of which is read and checked.

    Raises:
        DamagedError: names each file that is not what was saved or cannot be read.
        OSError: as ``read_manifest``.
        CheckpointError: a later paceline wrote it.
    """
    folder = root / slot.name
    manifest = read_manifest(root, slot)
    if problems := [p for name, entry in sorted(manifest.files.items()) if (p := _problem(folder / name, entry))]:
        raise DamagedError(*problems)
    try:
        state = json.loads(_read(folder / STATE))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise DamagedError(f"{slot.name}/{STATE}: holds no JSON object")
    return manifest, state


def read_manifest(root: Path, slot: Slot) -> Manifest:
    """The manifest of a committed checkpoint; the files that it lists are not read.

    Raises:
        DamagedError: manifest or marker is missing, or they do not fit each other or the slot.
        OSError: they cannot be read at present.
        CheckpointError: a later paceline wrote it.
    """
    folder = root / slot.name
    content, marker = _read(folder / MANIFEST), _read(folder / MARKER)
    place = f"{folder.name}/{MANIFEST}"
    if hashlib.sha256(content).hexdigest().encode() != marker.strip():
        raise DamagedError(f"{place}: {len(content):,} bytes whose checksum is not the one in {MARKER}")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        keys = ".".join(ascii(key)[1:-1] for key in first["loc"] if isinstance(key, str))
        raise DamagedError(f"{place}: {keys}: {first['msg']}") from None
    if manifest.version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: has format {manifest.version}",
            f"this paceline reads up to format {FORMAT_VERSION}",
            "pip install --upgrade paceline",
        )
    if manifest.step != slot.step:
        raise DamagedError(f"{place}: does not describe a checkpoint of step {slot.step}")
    if left_out := [name for name in _data_files(folder) if name not in manifest.files]:
        raise DamagedError(f"{place}: leaves out {', '.join(left_out)}")
    return manifest


def _data_files(folder: Path) -> list[str]:
    """Names of the files that a manifest has to list: those that must be there, and all others that could be read."""
    there = {name for name in os.listdir(folder) if re.match(FILE_NAME, name)}
    return sorted(there.union(REQUIRED))


def _problem(path: Path, entry: Entry) -> str | None:
    """What is wrong with a file of a checkpoint."""
    place = f"{path.parent.name}/{path.name}"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.num_bytes:
                return f"{place}: {size:,} bytes instead of {entry.num_bytes:,}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return f"{place}: its SHA-256 is not the one in {MANIFEST}"
    except OSError as error:
        return f"{place}: {error.strerror}"
    except DamagedError as error:
        return str(error)
    return None


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """A file for reading.

    Raises:
        DamagedError: it is missing, or is a link, a folder, a pipe or a device.
        OSError: it cannot be opened; which says nothing about what is in it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = {errno.ENOENT: "missing", errno.ELOOP: "is a link"}.get(error.errno or 0)
        if reason is None:
            raise
        raise DamagedError(f"{path.parent.name}/{path.name}: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path.parent.name}/{path.name}: is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file
