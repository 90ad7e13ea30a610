"""A folder per class, of texts or of images, with or without a folder per split above."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.columns import SPLITS, Roles
from paceline.data.sources import images
from paceline.data.sources.entries import Entries, broken_link, entries_of, leads_out, outside_notice
from paceline.data.sources.formats import FORMATS, file_format, kind_by_content, sample_kind
from paceline.data.sources.lines import bad_encoding, refuse_lfs_note, unreadable
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, Row, Source
from paceline.data.sources.table_folders import split_named
from paceline.recipe.parts import DataPart

LAYOUT = "FOLDER/CLASS/*.txt or FOLDER/CLASS/*.png, or with a split above: FOLDER/train/CLASS/..."

_MOST_FILES = 10_000
"""Looked at, so that the error comes at once also for a folder like a home."""

_SHOWN_KINDS = 5
"""Suffixes that are named."""

_ARCHIVES = {
    ".zip": "unzip {file} -d {folder}",
    ".tar": "tar -xf {file} -C {folder}",
    ".tgz": "tar -xzf {file} -C {folder}",
}
_ARCHIVES[".gz"] = _ARCHIVES[".tgz"]

_PICTURES = frozenset(
    {".heic", ".heif", ".svg", ".psd", ".dcm", ".raw", ".nef", ".cr2", ".dng", ".eps", ".tga", ".ico"}
)
_TEXT_FILES = frozenset({"", ".md", ".html", ".htm", ".log", ".rst", ".xml", ".tex", ".pdf", ".docx", ".doc", ".rtf"})
_KNOWN_CONVERSIONS = {
    **dict.fromkeys(_PICTURES, "save them as PNG, for example: mogrify -format png FOLDER/*/*{suffix}"),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".rtf"), "save their texts as .txt files"),
    **dict.fromkeys(_TEXT_FILES - {".pdf", ".docx", ".doc", ".rtf"}, "give texts the suffix .txt"),
}

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
    walk = _Walk(folder, sample_kind)
    has_splits = walk.read(name)
    if not walk.samples and not walk.broken:
        by_content = _Walk(folder, kind_by_content)
        has_splits = by_content.read(name)
        # a file of another kind among them is a sign that these are programs or weights
        walk = by_content if by_content.samples and not by_content.num_others else walk
    if not walk.samples and walk.broken:
        raise broken_link(walk.broken[0], str(Path(name) / walk.broken[0].relative_to(folder)), len(walk.broken))
    if not walk.samples:
        raise _nothing_to_read(folder, name)
    if len(walk.kinds) > 1:
        raise DataError("texts and images side by side", file=name, fix="keep them in folders of their own")
    return _Found(walk.samples, next(iter(walk.kinds)), has_splits, walk.broken, walk.notices(name))


def _splits_of(folders: Sequence[Path]) -> tuple[dict[Path, str], bool]:
    """Return the split of each folder that is named like one and holds folders, and whether a word of it says so."""
    named = {path: split for path in folders if (split := SPLITS.get(path.name.lower()) or split_named(path))}
    # "test" may be a class of its own
    inside = {path: entries_of(path) for path in named}
    named = {path: split for path, split in named.items() if inside[path].folders}
    exact = {path: split for path, split in named.items() if path.name.lower() in SPLITS}
    if exact:
        return exact, False
    is_whole = len(named) == len(folders) == len(set(named.values())) > 1
    is_whole = is_whole and not any(sample_kind(file) for path in named for file in inside[path].files)
    return (named if is_whole else {}), is_whole


class _Walk:
    """A walk through the folders of classes; counts what it passes over."""

    def __init__(self, root: Path, kind_of: Callable[[Path], str]) -> None:
        self._root, self._kind_of = root, kind_of
        self._ignored: Counter[str] = Counter()
        self._outside: list[Path] = []
        self._worded: dict[Path, str] = {}
        self.samples: list[_Sample] = []
        self.kinds: set[str] = set()
        """Kinds of the samples, ``text`` and ``image``."""
        self.num_others = 0
        """Files where samples are looked for that are none."""
        self.broken: list[Path] = []
        """Links to nothing where a sample or a class is looked for."""

    def read(self, name: str) -> bool:
        """Find the samples; return whether folders of splits hold them.

        Raises:
            DataError: folders of splits and of something else side by side.
        """
        top = entries_of(self._root)
        splits, by_word = _splits_of(top.folders)
        self._worded = splits if by_word else {}
        if not splits:
            loose = [] if top.folders else [_Sample(path, None, None) for path in self._samples_of(top)]
            self.samples = self._classes_of(top, None) if top.folders else loose
            return False
        if other := [path.name for path in top.folders if path not in splits and path.name not in UNLABELLED]:
            raise DataError(
                "folders of splits and of something else side by side",
                file=name,
                why=f"{', '.join(sorted(path.name for path in splits))} are splits;"
                f" {', '.join(map(repr, sorted(other)))} not",
                fix=f"use {LAYOUT}, or --data {next(iter(splits))} for one of them",
            )
        self._note_loose(top)
        for folder, split in splits.items():
            self.samples += self._classes_of(entries_of(folder), split)
        return True

    def _classes_of(self, parent: Entries, split: str | None) -> list[_Sample]:
        """Samples in the folders of ``parent``, each of which is a class."""
        samples = []
        self._note_loose(parent)
        for folder in parent.folders:
            if folder.name.lower() in UNLABELLED:
                self._ignored[f"folder(s) {folder.name!r} of unlabelled samples"] += 1
                continue
            inside = entries_of(folder)
            files = self._samples_of(inside)
            if not files:
                self._ignored[f"empty folder(s) {folder.name!r}"] += 1
            samples += [_Sample(path, folder.name, split) for path in files]
            for deeper in inside.folders:
                self._ignored[f"folder(s) inside class folders (such as {folder.name}/{deeper.name})"] += 1
        return samples

    def _samples_of(self, inside: Entries) -> list[Path]:
        """Texts and images of a folder."""
        self._note_links(inside)
        self._ignored["pipe(s) or device(s)"] += len(inside.special)
        kinds = {path: self._kind_of(path) for path in inside.files}
        for path, kind in kinds.items():
            if not kind:
                self._ignored[f"{path.suffix or 'suffixless'} file(s)"] += 1
        samples = [path for path, kind in kinds.items() if kind]
        self.num_others += len(kinds) - len(samples)
        self.kinds.update(kinds[path] for path in samples)
        return samples

    def _note_loose(self, inside: Entries) -> None:
        """Count samples and tables that lie beside folders, where nothing names their class."""
        self._note_links(inside)
        self._ignored["file(s) beside the class folders"] += sum(bool(sample_kind(path)) for path in inside.files)
        self._ignored["table(s) beside the class folders"] += sum(file_format(path) in FORMATS for path in inside.files)

    def notices(self, name: str) -> tuple[str, ...]:
        """A sentence for each kind of entry that was passed over, and one for links out of the folder."""
        ignored = [f"{name}: ignored {count:,} {what}" for what, count in sorted(self._ignored.items()) if count]
        read = [f"{path.name} as {split}" for path, split in self._worded.items()]
        ignored += [f"{name}: reads {', '.join(read)}"] * bool(read)
        if self._kind_of is not sample_kind:
            ignored.append(f"{name}: reads {len(self.samples):,} files without a suffix as {next(iter(self.kinds))}s")
        sentences = (*ignored, *outside_notice(name, self._root, self._outside))
        # the run's files hold notices, and cannot hold the names of files that are not UTF-8
        return tuple(sentence.encode("utf-8", "backslashreplace").decode() for sentence in sentences)

    def _note_links(self, inside: Entries) -> None:
        by_suffix = self._kind_of is sample_kind
        read = [path for path in inside.links if path.is_dir() or self._kind_of(path)]
        self._outside += [path for path in read if leads_out(path, self._root, by_suffix=by_suffix)]
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
        error.encoding = "utf-8" if encoding == "auto" else encoding
        raise bad_encoding(error, file, line) from None


def _nothing_to_read(folder: Path, name: str) -> DataError:
    """Return the error that names what ``folder`` holds, up to some 10,000 files, and the nearest thing to do."""
    files = _files_below(folder)
    held = _held(folder, files)
    return DataError(
        "no texts, images or tables found", file=name, why=f"it holds {held}", fix=_fix_of(folder, name, files)
    )


def _files_below(folder: Path) -> list[Path]:
    files: list[Path] = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(above, name) for name in sorted(names) if not name.startswith(".")]
        if len(files) >= _MOST_FILES:
            break
    return files[:_MOST_FILES]


def _held(folder: Path, files: list[Path]) -> str:
    if not files:
        return "no files"
    suffixes = Counter(path.suffix.lower() or "suffixless" for path in files)
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(_SHOWN_KINDS))
    more = ", ..." * (len(suffixes) > _SHOWN_KINDS)
    count = f"{'at least ' * (len(files) == _MOST_FILES)}{len(files):,} file{'s' * (len(files) > 1)}"
    return f"{count} ({kinds}{more}), such as {files[0].relative_to(folder)}"


def _fix_of(folder: Path, name: str, files: list[Path]) -> str:
    if (folder / "config.json").is_file() and any(path.suffix in (".safetensors", ".bin") for path in files):
        return f"a model is given with --model {name}"
    if samples := [path for path in files if sample_kind(path)]:
        return _fix_depth(folder, name, samples)
    tables = [path for path in files if file_format(path) in FORMATS]
    if tables and (above := {path.parent for path in tables}) and folder not in above:
        return f"--data {Path(name) / min(above).relative_to(folder)}"
    if not files:
        return f"put data there: {LAYOUT}"
    suffix = Counter(path.suffix.lower() for path in files).most_common(1)[0][0]
    if command := _ARCHIVES.get(suffix):
        return command.format(file=Path(name) / files[0].relative_to(folder), folder=name)
    return _KNOWN_CONVERSIONS.get(suffix, "use {layout}").format(suffix=suffix, layout=LAYOUT)


def _fix_depth(folder: Path, name: str, samples: list[Path]) -> str:
    """Samples lie deeper than a class folder: the folder to name, where there is one, else a move."""
    classes = {path.parent for path in samples}
    tops = {parent.parent.parent if parent.parent.name.lower() in SPLITS else parent.parent for parent in classes}
    if len(tops) == 1 and (top := tops.pop()).is_relative_to(folder) and top != folder:
        return f"--data {Path(name) / top.relative_to(folder)}"
    return f"move the files up: {LAYOUT}; now the first is {samples[0].relative_to(folder)}"
