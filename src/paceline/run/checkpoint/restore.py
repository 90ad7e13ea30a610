"""A run folder made again from its mirror: every byte is checked."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from paceline.contract.errors import CheckpointError, RunFolderError
from paceline.contract.files import disk_errors, fsync_folder, require_room, write_atomically
from paceline.run.checkpoint.manifest import MANIFEST, MARKER, STATE, Manifest, Slot
from paceline.run.checkpoint.mirror import FOLLOWING
from paceline.run.checkpoint.remote import Remote

_LARGEST_MANIFEST = 2**24


def restore(url: str, out: Path, tell: Callable[[str], None]) -> int:
    """Make a run folder out of what a mirror holds of it; returns the step of its newest checkpoint.

    It is built beside its place and renamed once it is whole.

    Args:
        url: of the run there, ``MIRROR/NAME``.
        out: the run folder, which must not be there yet.
        tell: hears of checkpoints that are unfinished or damaged there, which are left out.

    Raises:
        RecipeError: no such kind of file system.
        RunFolderError: something is at ``out`` already, or no run is at ``url``.
        CheckpointError: no checkpoint there is whole.
        DiskFullError: no room.
    """
    remote = Remote(url)
    if out.exists():
        raise RunFolderError(f"{out}: is there already", "a run would be overwritten", "choose another --out")
    beside = out.with_name(f".{out.name}.restoring")
    files = {name: content for name in FOLLOWING if (content := remote.read(name)) is not None}
    if "recipe.yaml" not in files:
        raise RunFolderError(
            f"{url}: no run is there", "it has no recipe.yaml", "give MIRROR/NAME, as loop.checkpoint_mirror made it"
        )
    with disk_errors(out):
        shutil.rmtree(beside, ignore_errors=True)  # of a call that was cut off
        beside.mkdir(parents=True)
        slots = sorted(slot for name in remote.names("checkpoints") if (slot := Slot.parse(name)))
        whole = [slot for slot in reversed(slots) if _fetch(remote, slot, beside / "checkpoints", tell)]
        for slot in set(slots) - set(whole):
            shutil.rmtree(beside / "checkpoints" / slot.name, ignore_errors=True)
        if not whole:
            shutil.rmtree(beside)
            raise CheckpointError(f"{url}: no whole checkpoint is there", "none was ever completely copied")
        for name, content in files.items():
            write_atomically(beside / name, content)
        os.rename(beside, out)
        fsync_folder(out.parent)
    return whole[0].step


def _fetch(remote: Remote, slot: Slot, root: Path, tell: Callable[[str], None]) -> bool:
    """Whether a checkpoint is whole there, and is here now."""
    place, folder = f"checkpoints/{slot.name}", root / slot.name
    content, marker = (remote.read(f"{place}/{name}", _LARGEST_MANIFEST) for name in (MANIFEST, MARKER))
    if content is None or marker is None:
        tell(f"{slot.name}: left out, it was not completely copied")
        return False
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError:
        manifest = None
    if (
        manifest is None
        or hashlib.sha256(content).hexdigest().encode() != marker.strip()
        or STATE not in manifest.files
    ):
        tell(f"{slot.name}: left out, its {MANIFEST} is damaged")
        return False
    folder.mkdir(parents=True, exist_ok=True)
    require_room(folder, sum(entry.num_bytes for entry in manifest.files.values()), f"the checkpoint {slot.name}")
    for name, entry in manifest.files.items():
        if remote.size(f"{place}/{name}") != entry.num_bytes:  # before a byte of it is fetched
            tell(f"{slot.name}: left out, {name} does not have its size")
            return False
        with (folder / name).open("wb") as file:
            found = remote.fetch(f"{place}/{name}", file)
        if found != entry.sha256:
            tell(f"{slot.name}: left out, {name} does not have its SHA-256")
            return False
    write_atomically(folder / MANIFEST, content)
    write_atomically(folder / MARKER, marker)
    return True
