"""The folder of CIFAR-10's binary version: files of records, each a byte of the label and 3,072 of the pixels.

Source: https://www.cs.toronto.edu/~kriz/cifar.html, section "Binary version".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paceline.contract.errors import DataError
from paceline.data.columns import Roles
from paceline.data.sources.images import require_pillow
from paceline.data.sources.lines import refuse_lfs_note, unreadable
from paceline.data.sources.rows import Row, Source

_RECORD = 1 + 3 * 32 * 32
_NAMES = "batches.meta.txt"
_PICKLED = "batches.meta"


def is_cifar(folder: Path) -> bool:
    """Whether a folder is the data set's, of the binary version or the pickled one."""
    return (folder / _PICKLED).is_file() or any(folder.glob("data_batch_*.bin"))


def files_of_cifar(folder: Path, name: str) -> list[Path]:
    """The files that ``read_cifar`` reads; raises the same errors."""
    if not any(folder.glob("data_batch_*.bin")):
        raise DataError(
            "pickled batches are not read",
            file=name,
            why="this is CIFAR-10's Python version, and loading a pickle runs whatever code is in it",
            fix="paceline data cifar10 DIR fetches its binary version (cifar-10-binary.tar.gz); then --data DIR",
        )
    named = [folder / _NAMES, folder / "test_batch.bin"]
    return [*sorted(folder.glob("data_batch_*.bin")), *(path for path in named if path.is_file())]


def read_cifar(folder: Path, name: str, *, labelled: bool = True) -> Source:
    """Rows with an image [32, 32, 3], its label and its split; a row's line is its number in the file, from 1.

    Labels are the names in ``batches.meta.txt``, or numbers where that is missing.

    Raises:
        DataError: of the pickled version; a file that is cut off; a label without a name.
    """
    files = files_of_cifar(folder, name)
    require_pillow(name)
    roles = Roles(
        content="image", is_image=True, label=("label",) if labelled else (), split="split" if labelled else None
    )
    return Source(name=name, rows=_rows(files, name), columns=("image", "label", "split"), roles=roles)


def _rows(files: list[Path], name: str) -> Iterator[Row]:
    names = [str(number) for number in range(10)]
    for path in files:
        if path.name == _NAMES:
            names = path.read_text(encoding="utf-8").split()
    for path in files:
        if path.name != _NAMES:
            yield from _records(path, f"{name}/{path.name}", names)


def _records(path: Path, file: str, names: list[str]) -> Iterator[Row]:
    try:
        refuse_lfs_note(path, file)
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise unreadable(file, error) from None
    if not len(content) or len(content) % _RECORD:
        why = f"it has {len(content):,} bytes, which are no whole number of records of {_RECORD:,}"
        raise DataError("not a whole file of CIFAR-10", file=file, why=why, fix="download and unpack it again")
    split = "test" if path.name.startswith("test") else "train"
    for number, record in enumerate(content.reshape(-1, _RECORD), 1):
        if record[0] >= len(names):
            why = f"there are {len(names)} classes, counted from 0"
            raise DataError("a label without a name", file=file, line=number, found=str(record[0]), why=why)
        # a plane a colour, a row after the other
        image = np.ascontiguousarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
        yield Row(file, number, {"image": image, "label": names[record[0]], "split": split})
