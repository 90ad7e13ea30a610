"""Checkpoints on disk: each is whole or does not exist, and what is damaged is noticed and named.

The store knows named tensors and JSON, nothing of models. A checkpoint is a folder of its own::

    step-00000120/            step-00000120.2/ is the same step saved once more, after a resume
      model.safetensors ...   one file a stem
      state.json
      manifest.json           format, step, is_best, and the size and SHA-256 of each file above
      COMMITTED               SHA-256 of manifest.json, written last: without it the folder is no checkpoint

It is built under a hidden name, every file and folder is fsynced, then it is renamed and marked. At no instant is an
older checkpoint touched before the newer one is committed, so a kill at any moment leaves the last one loadable.
Nothing is pickled: a checkpoint from a stranger can hold wrong numbers, but neither code nor a way out of its folder.

One process at a time may save into a folder (``paceline.run_folder`` holds the lock); any number may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.contract.errors import CheckpointError
from paceline.contract.files import digest, disk_errors, fsync_file, fsync_folder, require_room, write_atomically
from paceline.contract.records import CheckpointRecord
from paceline.contract.stopwatch import process_age
from paceline.run.checkpoint.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    MANIFEST,
    MARKER,
    STATE,
    DamagedError,
    Entry,
    Manifest,
    Slot,
    is_committed,
    open_regular,
    read_manifest,
    slots_of,
    verify,
)

_CLOCK_SECONDS = 2.0
"""By how much the clocks of a file system and of processes may differ."""

_LEFTOVER = re.compile(r"\.step-[0-9.]+\.(?:partial|discarded)-([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint whose files all had the right checksums a moment ago."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    """What was saved, as JSON gives it back: tuples are lists, keys are strings."""
    is_best: bool
    notices: tuple[str, ...] = ()
    """What a person should read: newer checkpoints that were unfinished or damaged, and which file was."""

    @property
    def digest(self) -> str:
        """SHA-256 of its manifest, which holds that of every file: equal for equal checkpoints alone."""
        return digest(self.folder / MANIFEST)

    def tensors(self, stem: str, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The named tensors saved under ``stem``, on ``device``; memory-mapped where that is the CPU.

        Raises:
            CheckpointError: the checkpoint has no such stem, or the file is no safetensors file.
        """
        path = self.folder / f"{stem}.safetensors"
        try:
            with open_regular(path):  # no link, no pipe
                return load_file(path, device=device)
        except (DamagedError, OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: no tensors {stem!r} can be read", str(error)) from None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they live; made by the first ``save``, in a folder that is there.
        keep_last: number of newest checkpoints to keep, each with the one that was the best until then.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last = {keep_last}: at least 1 checkpoint must be kept")
        self.folder, self.keep_last = folder, keep_last

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        *,
        is_best: bool = False,
    ) -> CheckpointRecord:
        """Commit a checkpoint, then drop those no longer needed.

        The last save is the newest checkpoint: those of later steps, which the run has gone back from, are dropped.
        The tensors must not change until this returns; they may share memory, be non-contiguous, or be on a device.

        Args:
            step: the update after which the state was taken.
            tensors: file stem (``model``, ``optimizer``) -> tensors by name.
            state: everything else, as JSON.
            is_best: ``best()`` gives this one from now on.

        When it raises, nothing is committed, the partial checkpoint is removed and older ones are intact.

        Raises:
            DiskFullError: too little room; says the bytes needed and free.
            RunFolderError: the folder cannot be written.
            CheckpointError: the disk failed.
        """
        began = time.perf_counter()
        content = json.dumps(dict(state)).encode()
        shards = {f"{stem}.safetensors": named for stem, named in tensors.items()}
        if unfit := [name for name in shards if not re.match(FILE_NAME, name)]:
            raise ValueError(f"{unfit[0]!r}: a stem is made of letters, digits, _ and -")
        needed = _room(content, shards)
        with _save_errors(self.folder, needed):
            self.folder.mkdir(exist_ok=True)  # a run folder that is gone is not made anew without a word
            _sweep(self.folder)
            require_room(self.folder, needed, f"a checkpoint of step {step}")
            slot = _free_slot(self.folder, step)
            manifest = _commit(self.folder / slot.name, content, shards, step=step, is_best=is_best)
        try:
            self._rotate(slot)
        except OSError as error:  # the new checkpoint is safe; the next save tries again
            warnings.warn(f"{self.folder}: older checkpoints were not dropped: {error}", stacklevel=2)
        num_bytes = sum(entry.num_bytes for entry in manifest.files.values())
        seconds = time.perf_counter() - began
        return CheckpointRecord(
            step=step, folder=str(self.folder / slot.name), num_bytes=num_bytes, seconds=seconds, is_best=is_best
        )

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is committed and whole; every byte is read and checked.

        Raises:
            CheckpointError: there is none, or all are damaged; never an empty start in silence.
        """
        notices: list[str] = []
        damaged: list[str] = []
        for slot in reversed(slots_of(self.folder)):
            if not is_committed(self.folder, slot):
                notices.append(f"{slot.name}: left out, the run ended while it was being saved")
                continue
            try:
                found = _load(self.folder, slot)
            except (DamagedError, OSError) as error:
                damaged += _problems(error)
                notices.append(f"damaged checkpoint left out: {'; '.join(_problems(error))}")
                continue
            if notices:
                notices.append(f"going on from the checkpoint before it, of step {found.step}")
            return replace(found, notices=tuple(notices))
        fix = "start a new run with another --out"
        if not damaged:
            raise CheckpointError(f"{self.folder}: no checkpoint", "none was ever completely saved", fix)
        raise CheckpointError(
            "\n  ".join([f"{self.folder}: every checkpoint is damaged", *damaged]),
            "these files are not what was once saved: a failing disk, a broken copy, or somebody changed them",
            f"put a whole copy of one of them back, or {fix}",
        )

    def best(self) -> Checkpoint | None:
        """The last checkpoint saved with ``is_best``, fully checked; None when there was none.

        Raises:
            CheckpointError: it is damaged; says which file.
        """
        unreadable: list[str] = []
        for slot in reversed(slots_of(self.folder)):
            if not is_committed(self.folder, slot):
                continue
            try:
                if read_manifest(self.folder, slot).is_best:
                    notices = tuple(f"damaged checkpoint left out: {problem}" for problem in unreadable)
                    return replace(_load(self.folder, slot), notices=notices)
            except (DamagedError, OSError) as error:
                unreadable += _problems(error)
        if not unreadable:
            return None
        raise CheckpointError(
            "\n  ".join([f"{self.folder}: the best checkpoint is damaged", *unreadable]),
            "these files are not what was once saved: a failing disk, a broken copy, or somebody changed them",
            "put a whole copy of it back, or go without it: --set loop.save_best=false",
        )

    def steps(self) -> tuple[int, ...]:
        """Steps of the committed checkpoints, ascending; their files are not read."""
        return tuple(sorted({slot.step for slot in _sound(self.folder, slots_of(self.folder))}))

    def _rotate(self, saved: Slot) -> None:
        """Drop all but the newest ``keep_last`` up to ``saved``, and their best; ``saved`` itself always stays."""
        slots = slots_of(self.folder)
        committed = {slot: manifest for slot, manifest in _sound(self.folder, slots).items() if slot <= saved}
        last_of_step = {slot.step: slot for slot in committed}  # ascending, so the last edition of a step wins
        keep = {saved, *list(last_of_step.values())[-self.keep_last :]}
        marked = [slot for slot, manifest in committed.items() if manifest.is_best]
        for kept in tuple(keep):  # each with the best of its time: a fall back to it must not lose that
            keep.update([slot for slot in marked if slot <= kept][-1:])
        for slot in slots:
            if slot not in keep:
                _discard(self.folder / slot.name)
        _sweep(self.folder)


def _problems(error: DamagedError | OSError) -> tuple[str, ...]:
    return error.problems if isinstance(error, DamagedError) else (str(error),)


def _load(root: Path, slot: Slot) -> Checkpoint:
    manifest, state = verify(root, slot)
    return Checkpoint(step=slot.step, folder=root / slot.name, state=state, is_best=manifest.is_best)


def _sound(root: Path, slots: Iterable[Slot]) -> dict[Slot, Manifest]:
    """Those that are committed and whose manifests can be trusted, in their order; the other files are not read."""
    found = {}
    for slot in slots:
        with contextlib.suppress(DamagedError):  # newest() and best() tell of those
            found[slot] = read_manifest(root, slot)
    return found


def _separate(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors on the host, contiguous and without common memory; copied only where they were not."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    apart: dict[str, torch.Tensor] = {}
    end = 0
    for name, tensor in sorted(host.items(), key=lambda item: item[1].data_ptr()):
        overlaps = tensor.data_ptr() < end
        apart[name] = tensor.clone() if overlaps else tensor
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


def _room(content: bytes, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
    """Bytes that a checkpoint takes at most: data, a header line a tensor, and 64 KiB for manifest and folders."""
    tensors = [(name, tensor) for named in shards.values() for name, tensor in named.items()]
    headers = sum(6 * len(name) + 256 for name, _ in tensors)
    return len(content) + sum(tensor.nbytes for _, tensor in tensors) + headers + 65536


def _commit(
    folder: Path, content: bytes, shards: Mapping[str, Mapping[str, torch.Tensor]], *, step: int, is_best: bool
) -> Manifest:
    """Build a checkpoint under a hidden name, then rename and mark it; what failed on the way leaves nothing behind."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        files = _write_files(partial, content, shards)
        manifest = Manifest(
            format="paceline checkpoint", version=FORMAT_VERSION, step=step, is_best=is_best, files=files
        )
        _write(partial / MANIFEST, manifest.model_dump_json(indent=1).encode())
        marker = digest(partial / MANIFEST)
        fsync_folder(partial)
        os.rename(partial, folder)
        fsync_folder(folder.parent)
        write_atomically(folder / MARKER, marker.encode())
    except BaseException:
        if os.path.lexists(partial):
            _remove(partial)
        if os.path.lexists(folder):
            _discard(folder)
        raise
    return manifest


def _write_files(folder: Path, content: bytes, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Entry]:
    """Write and fsync state and tensors; what the manifest says about each."""
    _write(folder / STATE, content)
    for name, named in shards.items():
        path = folder / name
        save_file(_separate(named), path)
        shutil.copymode(folder / STATE, path)  # safetensors makes files that only their owner can read
        fsync_file(path)
    return {
        name: Entry(num_bytes=(folder / name).stat().st_size, sha256=digest(folder / name)) for name in (STATE, *shards)
    }


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _save_errors(folder: Path, needed: int) -> Iterator[None]:
    try:
        with disk_errors(folder, needed):
            yield
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the checkpoint was not saved",
            str(error),
            "see to the disk, then --resume: older checkpoints are intact",
        ) from error


def _free_slot(folder: Path, step: int) -> Slot:
    slot = Slot(step)
    while os.path.lexists(folder / slot.name):
        slot = Slot(step, slot.edition + 1)
    return slot


def _sweep(folder: Path) -> None:
    """Remove what crashed saves left behind: their processes are dead, or long past that save (our own)."""
    for name in os.listdir(folder):
        if leftover := _LEFTOVER.fullmatch(name):
            process = int(leftover[1])
            if process == os.getpid() or not _is_alive(process) or _is_younger(process, folder / name):
                _remove(folder / name)
    for slot in slots_of(folder):
        if not is_committed(folder, slot):
            _discard(folder / slot.name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _is_younger(process: int, path: Path) -> bool:
    """Whether a process was started after ``path`` was last changed: it has the number of the one that wrote it."""
    age = process_age(process)
    with contextlib.suppress(OSError):
        return age is not None and time.time() - age > path.lstat().st_mtime + _CLOCK_SECONDS
    return False


def _discard(folder: Path) -> None:
    """Remove a checkpoint; first it loses its name, so that no half of it is ever taken for a damaged one."""
    hidden = folder.with_name(f".{folder.name}.discarded-{os.getpid()}")
    try:
        os.rename(folder, hidden)
    except OSError as error:
        warnings.warn(f"{folder}: cannot be removed: {error.strerror}", stacklevel=2)
    else:
        _remove(hidden)


def _remove(path: Path) -> None:
    """Delete a hidden folder; what cannot be deleted now is tried again by the next save."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        warnings.warn(f"{path}: cannot be removed yet: {error.strerror}", stacklevel=2)
