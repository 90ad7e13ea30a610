"""The error for a folder in which there is nothing to read: it says what is there, and what to type."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.columns import SPLITS
from paceline.data.sources.formats import FORMATS, file_format, sample_kind

LAYOUT = "FOLDER/CLASS/*.txt or FOLDER/CLASS/*.png, or with a split above: FOLDER/train/CLASS/..."

_MOST_FILES = 10_000
"""Looked at, so that the error comes at once also for a folder like a home."""

_KINDS = 5
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
_TEXTS = frozenset({"", ".md", ".html", ".htm", ".log", ".rst", ".xml", ".tex", ".pdf", ".docx", ".doc", ".rtf"})
_KNOWN_CONVERSIONS = {
    **dict.fromkeys(_PICTURES, "save them as PNG, for example: mogrify -format png FOLDER/*/*{suffix}"),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".rtf"), "save their texts as .txt files"),
    **dict.fromkeys(_TEXTS - {".pdf", ".docx", ".doc", ".rtf"}, "give texts the suffix .txt"),
}


def nothing_to_read(folder: Path, name: str) -> DataError:
    """Return the error that names what ``folder`` holds, up to some 10,000 files, and the nearest thing to do."""
    files = _files_below(folder)
    held = _held(folder, files)
    return DataError(
        "no texts, images or tables found", file=name, why=f"it holds {held}", fix=_fix(folder, name, files)
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
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes.most_common(_KINDS))
    more = ", ..." * (len(suffixes) > _KINDS)
    count = f"{'at least ' * (len(files) == _MOST_FILES)}{len(files):,} file{'s' * (len(files) > 1)}"
    return f"{count} ({kinds}{more}), such as {files[0].relative_to(folder)}"


def _fix(folder: Path, name: str, files: list[Path]) -> str:
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
