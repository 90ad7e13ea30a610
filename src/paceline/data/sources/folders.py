"""A folder per class, of texts or of images, with or without a folder per split above."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.columns import SPLITS, Roles
from paceline.data.sources import images
from paceline.data.sources.contents import LAYOUT, nothing_to_read
from paceline.data.sources.entries import Entries, entries_of
from paceline.data.sources.formats import FORMATS, file_format, sample_kind
from paceline.data.sources.lines import bad_encoding, refuse_lfs_note, unreadable
from paceline.data.sources.links import broken_link, leads_out, outside_notice
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, Row, Source
from paceline.recipe.parts import DataPart

UNLABELLED = frozenset({"unsup", "unsupervised", "unlabeled", "unlabelled"})
"""Folders of samples without a class, as the IMDB archive has one."""


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
    broken: list[Path]
    """Links to nothing."""
    notices: tuple[str, ...]


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that ``read_folder`` reads, in its order, then the links to nothing; raises the same errors."""
    found = _find(folder, name)
    return [*(sample.path for sample in found.samples), *found.broken]


def read_folder(folder: Path, name: str, part: DataPart, bad: BadRows, *, labelled: bool = True) -> Source:
    """Rows with the columns ``text`` or ``image``, ``label`` (the folder), ``split`` (where there is one) and ``file``.

    Hidden files are passed over; folders named in ``UNLABELLED`` and files of other kinds are, with a notice. Links to
    nothing go to ``bad``.

    Raises:
        DataError: no class folders, texts and images mixed, split and class folders mixed; a link out of the folder to
            a file of another kind.
    """
    found = _find(folder, name)
    if labelled and any(sample.label is None for sample in found.samples):
        raise DataError(
            "no folder per class",
            file=name,
            why="the files lie in the folder itself, so nothing names their class",
            fix=f"sort them into folders: {LAYOUT}",
        )
    classes = dict.fromkeys(sample.label or "" for sample in found.samples)
    if labelled and not found.has_splits and all(label.lower() in SPLITS for label in classes):
        raise DataError(
            "no folder per class below the splits",
            file=name,
            why=f"{', '.join(classes)} are splits, and the files lie in them, so nothing names their class",
            fix=f"sort them into folders: {LAYOUT}; or name a table of their file names and labels",
        )
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
    notices = found.notices
    if labelled and found.has_splits and not roles.split:
        splits = " and ".join(dict.fromkeys(sample.split or "" for sample in found.samples))
        notices += (f"{name}: all of {splits} is read together; name the folder of one split",)
    return Source(name=name, rows=rows, columns=columns, roles=roles, notices=notices)


def _find(folder: Path, name: str) -> _Found:
    walk = _Walk(folder)
    top = entries_of(folder)
    named = {path.name: SPLITS.get(path.name.lower()) for path in top.folders}
    # a folder named like a split is one when it holds folders; "test" may be a class of its own
    split_folders = [path for path in top.folders if named[path.name] and entries_of(path).folders]
    samples: list[_Sample] = []
    if split_folders:
        if other := [path.name for path in top.folders if path not in split_folders and path.name not in UNLABELLED]:
            raise DataError(
                "folders of splits and of something else side by side",
                file=name,
                why=f"{', '.join(sorted(path.name for path in split_folders))} are splits;"
                f" {', '.join(map(repr, sorted(other)))} not",
                fix=f"use {LAYOUT}, or --data {split_folders[0]} for one of them",
            )
        walk.note_loose(top)
        for split_folder in split_folders:
            samples += walk.classes_of(entries_of(split_folder), named[split_folder.name])
    elif top.folders:
        samples = walk.classes_of(top, None)
    else:
        samples = [_Sample(path, None, None) for path in walk.samples_of(top)]
    if not samples and walk.broken:
        raise broken_link(walk.broken[0], str(Path(name) / walk.broken[0].relative_to(folder)), len(walk.broken))
    if not samples:
        raise nothing_to_read(folder, name)
    kinds = {sample_kind(sample.path) for sample in samples}
    if len(kinds) > 1:
        raise DataError("texts and images side by side", file=name, fix="keep them in folders of their own")
    return _Found(samples, kinds.pop(), bool(split_folders), walk.broken, walk.notices(name))


class _Walk:
    """A walk through the folders of classes; counts what it passes over."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ignored: Counter[str] = Counter()
        self._outside: list[Path] = []
        self.broken: list[Path] = []
        """Links to nothing where a sample or a class is looked for."""

    def classes_of(self, parent: Entries, split: str | None) -> list[_Sample]:
        """Samples in the folders of ``parent``, each of which is a class."""
        samples = []
        self.note_loose(parent)
        for folder in parent.folders:
            if folder.name.lower() in UNLABELLED:
                self._ignored[f"folder(s) {folder.name!r} of unlabelled samples"] += 1
                continue
            inside = entries_of(folder)
            files = self.samples_of(inside)
            if not files:
                self._ignored[f"empty folder(s) {folder.name!r}"] += 1
            samples += [_Sample(path, folder.name, split) for path in files]
            for deeper in inside.folders:
                self._ignored[f"folder(s) inside class folders (such as {folder.name}/{deeper.name})"] += 1
        return samples

    def samples_of(self, inside: Entries) -> list[Path]:
        """Texts and images of a folder."""
        self._note_links(inside)
        self._ignored["pipe(s) or device(s)"] += len(inside.special)
        for path in inside.files:
            if not sample_kind(path):
                self._ignored[f"{path.suffix or 'suffixless'} file(s)"] += 1
        return [path for path in inside.files if sample_kind(path)]

    def note_loose(self, inside: Entries) -> None:
        """Count samples and tables that lie beside folders, where nothing names their class."""
        self._note_links(inside)
        self._ignored["file(s) beside the class folders"] += sum(bool(sample_kind(path)) for path in inside.files)
        self._ignored["table(s) beside the class folders"] += sum(file_format(path) in FORMATS for path in inside.files)

    def notices(self, name: str) -> tuple[str, ...]:
        """A sentence for each kind of entry that was passed over, and one for links out of the folder."""
        ignored = [f"{name}: ignored {count:,} {what}" for what, count in sorted(self._ignored.items()) if count]
        sentences = (*ignored, *outside_notice(name, self._root, self._outside))
        # the run's files hold notices, and cannot hold the names of files that are not UTF-8
        return tuple(sentence.encode("utf-8", "backslashreplace").decode() for sentence in sentences)

    def _note_links(self, inside: Entries) -> None:
        read = [path for path in inside.links if path.is_dir() or sample_kind(path)]
        self._outside += [path for path in read if leads_out(path, self._root)]
        # a link without a suffix may have led to the folder of a class
        self.broken += [path for path in inside.broken if sample_kind(path) or not path.suffix]


def _is_undecoded(name: str) -> bool:
    """Whether some bytes of a file's name are no characters; Python puts halves of surrogate pairs in their place."""
    return any("\ud800" <= character <= "\udfff" for character in name)


def _rows(found: _Found, folder: Path, name: str, encoding: str, bad: BadRows) -> Iterator[Row]:
    """Texts as they are read; images as paths, for the gatherer knows what the model makes of them."""
    for path in found.broken:
        relative = path.relative_to(folder)
        bad.report(broken_link(path, str(Path(name) / relative), len(found.broken)), str(relative))
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
        refuse_lfs_note(path, file)
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        return raw.decode("utf-8" if encoding == "auto" else encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise bad_encoding(error, file, line) from None
