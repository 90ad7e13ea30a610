"""A folder per class, of texts or of images, with or without a folder per split above."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.bad_rows import BadRows
from paceline.data.columns import SPLITS, Roles
from paceline.data.sources import images
from paceline.data.sources.lines import bad_encoding, unreadable
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, Row, Source
from paceline.errors import DataError
from paceline.recipe.parts import DataPart

TEXT_SUFFIXES = frozenset({".txt", ".text"})
UNLABELLED = frozenset({"unsup", "unsupervised", "unlabeled", "unlabelled"})
"""Folders of samples without a class, as the IMDB archive has one."""

_LAYOUT = "FOLDER/CLASS/*.txt or FOLDER/CLASS/*.png, or with a split above: FOLDER/train/CLASS/..."


@dataclass(frozen=True)
class _Sample:
    path: Path
    label: str | None
    split: str | None


@dataclass(frozen=True)
class _Found:
    samples: list[_Sample]
    kind: str
    """``text`` or ``image``."""
    has_splits: bool
    notices: tuple[str, ...]


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that ``read_folder`` reads, in its order; raises the same errors."""
    return [sample.path for sample in _find(folder, name).samples]


def read_folder(folder: Path, name: str, part: DataPart, bad: BadRows, *, labelled: bool = True) -> Source:
    """Rows with the columns ``text`` or ``image``, ``label`` (the folder), ``split`` (where there is one) and ``file``.

    Hidden files are passed over; folders named in ``UNLABELLED`` and files of other kinds are, with a notice.

    Raises:
        DataError: no class folders, texts and images mixed, split and class folders mixed.
    """
    found = _find(folder, name)
    if labelled and any(sample.label is None for sample in found.samples):
        raise DataError(
            "no folder per class",
            file=name,
            why="the files lie in the folder itself, so nothing names their class",
            fix=f"sort them into folders: {_LAYOUT}",
        )
    classes = dict.fromkeys(sample.label or "" for sample in found.samples)
    if labelled and (undecoded := next(filter(_is_undecoded, classes), None)):
        raise DataError(
            "a folder of a class is not UTF-8",
            file=name,
            found=undecoded,
            why="its name is that of the class, which the saved model holds",
            fix=f"rename it, for example with convmv -f latin-1 -t utf-8 -r --notest {name}",
        )
    if found.kind == "image":
        images.require_pillow(name)
    roles = Roles(
        content=found.kind,
        is_image=found.kind == "image",
        label=("label",) if labelled else (),
        split="split" if labelled and found.has_splits and part.split is not None else None,
    )
    columns = (found.kind, "label", *(["split"] * found.has_splits), "file")
    rows = _rows(found, folder, name, part.encoding, bad)
    return Source(name=name, rows=rows, columns=columns, roles=roles, notices=found.notices)


def _find(folder: Path, name: str) -> _Found:
    ignored: Counter[str] = Counter()
    inner = _subfolders(folder)
    named = {path.name: SPLITS.get(path.name.lower()) for path in inner}
    # a folder named like a split is one when it holds folders; "test" may be a class of its own
    split_folders = [path for path in inner if named[path.name] and _subfolders(path)]
    samples: list[_Sample] = []
    if split_folders:
        if other := [path.name for path in inner if path not in split_folders and path.name not in UNLABELLED]:
            raise DataError(
                "folders of splits and of something else side by side",
                file=name,
                why=f"{', '.join(sorted(path.name for path in split_folders))} are splits;"
                f" {', '.join(map(repr, sorted(other)))} not",
                fix=f"use {_LAYOUT}",
            )
        _note_loose(folder, ignored)
        for split_folder in split_folders:
            samples += _of_classes(split_folder, named[split_folder.name], ignored)
    elif inner:
        samples = _of_classes(folder, None, ignored)
    else:
        samples = [_Sample(path, None, None) for path in _files(folder, ignored)]
    kinds = {_kind(sample.path) for sample in samples}
    if not samples:
        arrow = next((path.name for path in sorted(folder.glob("*.arrow"))), None)
        fix = f"name the file: {name}/{arrow}" if arrow else f"use {_LAYOUT}"
        raise DataError("no texts and no images found", file=name, fix=fix)
    if len(kinds) > 1:
        raise DataError("texts and images side by side", file=name, fix="keep them in folders of their own")
    notices = [f"{name}: ignored {count:,} {what}" for what, count in sorted(ignored.items())]
    # the run's files hold notices, and cannot hold the names of files that are not UTF-8
    told = tuple(notice.encode("utf-8", "backslashreplace").decode() for notice in notices)
    return _Found(samples, kinds.pop(), bool(split_folders), told)


def _of_classes(parent: Path, split: str | None, ignored: Counter[str]) -> list[_Sample]:
    samples = []
    _note_loose(parent, ignored)
    for folder in _subfolders(parent):
        if folder.name.lower() in UNLABELLED:
            ignored[f"folder(s) {folder.name!r} of unlabelled samples"] += 1
            continue
        files = _files(folder, ignored)
        if not files:
            ignored[f"empty folder(s) {folder.name!r}"] += 1
        samples += [_Sample(path, folder.name, split) for path in files]
        for deeper in _subfolders(folder):
            ignored[f"folder(s) inside class folders (such as {folder.name}/{deeper.name})"] += 1
    return samples


def _note_loose(parent: Path, ignored: Counter[str]) -> None:
    """Count the texts and images that lie beside folders, where nothing names their class."""
    if loose := _files(parent, Counter()):
        ignored["file(s) beside the class folders"] += len(loose)


def _subfolders(folder: Path) -> list[Path]:
    with _entries(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path, ignored: Counter[str]) -> list[Path]:
    """Texts and images of a folder, sorted by name as text."""
    found = []
    with _entries(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_file():
                continue
            path = Path(entry.path)
            if _kind(path):
                found.append(path)
            else:
                ignored[f"{path.suffix or 'suffixless'} file(s)"] += 1
    return sorted(found)


def _is_undecoded(name: str) -> bool:
    """Whether some bytes of a file's name are no characters; Python puts halves of surrogate pairs in their place."""
    return any("\ud800" <= character <= "\udfff" for character in name)


@contextlib.contextmanager
def _entries(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise unreadable(str(folder), error) from None


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "text" if suffix in TEXT_SUFFIXES else "image" if suffix in images.SUFFIXES else ""


def _rows(found: _Found, folder: Path, name: str, encoding: str, bad: BadRows) -> Iterator[Row]:
    """Texts as they are read; images are opened by who knows what the model makes of them."""
    for sample in found.samples:
        relative = sample.path.relative_to(folder)
        file = str(Path(name) / relative)
        try:
            content = _text(sample.path, file, encoding) if found.kind == "text" else sample.path
        except DataError as error:
            bad.report(error, str(relative))
            continue
        named = {"label": sample.label, "split": sample.split}
        known = {column: value for column, value in named.items() if value is not None}
        yield Row(file, 0, {found.kind: content, **known, "file": str(relative)})


def _text(path: Path, file: str, encoding: str) -> str:
    try:
        if path.stat().st_size > 4 * MAX_CELL_CHARACTERS:
            raise DataError(
                f"a text of over {4 * MAX_CELL_CHARACTERS // 1_000_000} MB",
                file=file,
                fix="cut it into texts of the length that a model reads, or remove it",
            )
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        return raw.decode("utf-8" if encoding == "auto" else encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise bad_encoding(error, file, line) from None
