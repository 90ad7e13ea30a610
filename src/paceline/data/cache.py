"""Encoded data sets on disk: written whole or not at all, checked on the way back, large arrays memory-mapped.

An entry is a folder of .npy files, ``meta.json``, and ``meta.sha256``, the digest of the former. ``meta.json`` holds
the size and the CRC-32 of every array; all are checked whenever an entry is opened. CRC-32 finds what disks and copies
do to bytes, and is the quickest that Python has (2.3 to 3.7 GB/s where SHA-256 does 1.6). Entries are data only:
nothing in them is ever executed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.files import fsync_file, fsync_folder, is_irregular
from paceline.data.dataset import Dataset, Images, Origins, Tokens

FORMAT = 2
"""The format of an entry; part of its key, so that entries of another format are never opened."""

_MAPPED = ("flat", "types", "pixels")
"""Arrays that stay on the disk, where the system reads what is used."""

_LEFTOVER = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{8}(\.old)?")
_ABANDONED_SECONDS = 86400.0
_SPLIT = "split_"
_CHUNK_BYTES = 2**20
_TOKENS = ("pad_id", "pairs", "typed", "pad_type", "pad_left", "specials")
"""What is kept of tokens beside the arrays."""


class DamagedEntry(Exception):
    """A cache entry that is not what was written."""


def dataset_fingerprint(
    inputs: Tokens | Images,
    labels: NDArray[Any],
    kind: str,
    label_names: tuple[str, ...],
    splits: Mapping[str, NDArray[np.int64]],
) -> str:
    """SHA-256 of samples, labels and splits: their values, shapes and types."""
    digest = hashlib.sha256(json.dumps([kind, label_names]).encode())
    for name, array in sorted({**_input_arrays(inputs), "labels": labels, **_split_arrays(splits)}.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    if isinstance(inputs, Tokens) and (inputs.pad_left or inputs.pad_type):
        digest.update(f"filling {inputs.pad_left} {inputs.pad_type}".encode())
    return digest.hexdigest()


def save(dataset: Dataset, folder: Path) -> None:
    """Write an entry; one that is already there, damaged or made by another process meanwhile, is replaced.

    Raises:
        OSError: no room or no permission; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        _write(dataset, temporary)
        discarded = temporary.with_name(f"{temporary.name}.old")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(discarded)
            shutil.rmtree(discarded)
        temporary.rename(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return  # another process was faster, and its entry is as good
        raise
    fsync_folder(folder.parent)


def _sweep(parent: Path) -> None:
    """Remove what killed processes left half-written: hidden entries that nobody has touched for a day.

    Other machines may write into the same folder, so that a process id would say nothing.
    """
    long_ago = time.time() - _ABANDONED_SECONDS
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < long_ago:
                shutil.rmtree(entry.path, ignore_errors=True)


def load(folder: Path) -> Dataset | None:
    """The entry in ``folder``, tokens or pixels memory-mapped; None when there is none.

    Raises:
        DamagedEntry: the entry is incomplete or was changed.
    """
    if not folder.exists():
        return None
    try:
        if strange := next(filter(is_irregular, folder.iterdir()), None):
            raise DamagedEntry(f"{strange.name} is no regular file")
        content = (folder / "meta.json").read_bytes()
        if hashlib.sha256(content).hexdigest() != (folder / "meta.sha256").read_text(encoding="ascii"):
            raise DamagedEntry("meta.json does not have its digest")
        meta = json.loads(content)
        return _dataset(meta, {name: _read(folder, name, known) for name, known in meta["arrays"].items()})
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntry(str(error)) from None


def _write(dataset: Dataset, folder: Path) -> None:
    origins = dataset.origins
    arrays = {
        **_input_arrays(dataset.inputs),
        **_split_arrays(dataset.splits),
        "labels": dataset.labels,
        "file_index": origins.file_index,
        "lines": origins.lines,
        **_whole_array(dataset.inputs),
    }
    known = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        np.save(path, array, allow_pickle=False)
        known[name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    meta = {
        "kind": dataset.kind,
        "label_names": dataset.label_names,
        "files": origins.files,
        "notices": dataset.notices,
        "fingerprint": dataset.fingerprint,
        "tokens": {name: getattr(dataset.inputs, name) for name in _TOKENS} if not dataset.is_images else None,
        "splits": list(dataset.splits),
        "arrays": known,
    }
    content = json.dumps(meta, indent=1).encode()
    (folder / "meta.json").write_bytes(content)
    (folder / "meta.sha256").write_text(hashlib.sha256(content).hexdigest(), encoding="ascii")
    for path in folder.iterdir():
        fsync_file(path)
    fsync_folder(folder)


def _read(folder: Path, name: str, known: Mapping[str, Any]) -> NDArray[Any]:
    path = folder / f"{name}.npy"
    if os.path.getsize(path) != known["bytes"]:
        raise DamagedEntry(f"{path.name} does not have its size")
    if _crc32(path) != known["crc32"]:
        raise DamagedEntry(f"{path.name} does not have its checksum")
    return np.asarray(np.load(path, mmap_mode="r" if name in _MAPPED else None, allow_pickle=False))


def _crc32(path: Path) -> int:
    """CRC-32 of a file's content, read piece by piece: a disk that fails is an error here, not a signal."""
    found, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            found = zlib.crc32(buffer[:read], found)
    return found


def _dataset(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    inputs: Tokens | Images
    if "pixels" in arrays:
        inputs = Images(arrays["pixels"])
    else:
        known = {**meta["tokens"], "specials": tuple(meta["tokens"]["specials"])}
        optional: dict[str, Any] = {name: arrays.get(name) for name in ("second", "types", "whole", "windows")}
        inputs = Tokens(arrays["flat"], arrays["offsets"], **optional, **known)
    return Dataset(
        inputs=inputs,
        labels=arrays["labels"],
        kind=meta["kind"],
        label_names=tuple(meta["label_names"]),
        splits={name: arrays[_SPLIT + name] for name in meta["splits"]},
        origins=Origins(tuple(meta["files"]), arrays["file_index"], arrays["lines"]),
        fingerprint=meta["fingerprint"],
        notices=tuple(meta["notices"]),
    )


def _input_arrays(inputs: Tokens | Images) -> dict[str, NDArray[Any]]:
    if isinstance(inputs, Images):
        return {"pixels": inputs.pixels}
    arrays: dict[str, NDArray[Any]] = {"flat": inputs.flat, "offsets": inputs.offsets}
    optional = {"second": inputs.second, "types": inputs.types, "windows": inputs.windows}
    return {**arrays, **{name: array for name, array in optional.items() if array is not None}}


def _whole_array(inputs: Tokens | Images) -> dict[str, NDArray[Any]]:
    """Lengths before samples were cut: nothing is trained on them, so that they are no part of the fingerprint."""
    return {} if isinstance(inputs, Images) or inputs.whole is None else {"whole": inputs.whole}


def _split_arrays(splits: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    return {_SPLIT + name: ids for name, ids in splits.items()}
