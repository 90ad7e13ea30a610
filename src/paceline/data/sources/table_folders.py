"""A folder of tables: one a split, as ``train.csv`` and ``test.csv``, or pieces of one, as ``part-0.parquet``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.contract.errors import DataError
from paceline.data.columns import SPLITS
from paceline.data.sources.entries import Entries, broken_link, entries_of, leads_out, outside_notice
from paceline.data.sources.formats import FORMATS, file_format, sample_kind

_ORDER = ("train", "validation", "test")
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
_PIECE_OF = re.compile(r"(\d+)-of-(\d+)")
_SHOWN = 5
_SETTINGS = frozenset(
    f"{name}.json"
    for name in (
        *("config", "generation_config", "preprocessor_config", "tokenizer", "tokenizer_config", "special_tokens_map"),
        *("added_tokens", "vocab", "dataset_info", "dataset_infos", "state", "package"),
    )
)
"""Files of settings, as libraries of models and data sets name them."""


class TableFile(NamedTuple):
    """A table in a folder."""

    path: Path
    name: str
    """As the user would write it."""
    split: str | None


@dataclass(frozen=True)
class TableFolder:
    """The tables that a folder is read from, training first."""

    files: list[TableFile]
    notices: tuple[str, ...]


def find_tables(folder: Path, name: str) -> TableFolder | None:
    """Return the tables to read of a folder; None where it holds none, or is one of samples in folders of classes.

    Tables are in the folder itself, in folders named like splits, or in one named ``data``, as the Hub has it. Where
    some are named like splits, the others are left out with a notice.

    Raises:
        DataError: tables that cannot be told apart, a piece that is missing, a link to nothing.
    """
    top = entries_of(folder)
    scanned = [(None, top), *((SPLITS[each.name.lower()], entries_of(each)) for each in _splits_of(top))]
    tables = [(split or split_named(path), path) for split, inside in scanned for path in _tables_of(inside.files)]
    broken = [path for _, inside in scanned for path in _tables_of(inside.broken)]
    if not tables and not broken:
        inner = folder / "data"
        return find_tables(inner, f"{name}/data") if inner in top.folders else None
    if _holds_classes(top):
        return None
    if broken:
        raise broken_link(broken[0], str(Path(name) / broken[0].relative_to(folder)), len(broken))
    by_split: dict[str | None, list[Path]] = defaultdict(list)
    for split, path in tables:
        by_split[split].append(path)
    unnamed = by_split.pop(None, []) if len(by_split) > 1 else []
    if unnamed and "train" not in by_split:
        raise _ambiguous(folder, name, "train", [*unnamed, *(path for paths in by_split.values() for path in paths)])
    splits = sorted(by_split, key=lambda split: _ORDER.index(split) if split else 0)
    for split in splits:
        _require_pieces(folder, name, split, by_split[split])
    files = [
        TableFile(path, str(Path(name) / path.relative_to(folder)), split if len(splits) > 1 else None)
        for split in splits
        for path in by_split[split]
    ]
    links = [path for _, inside in scanned for path in inside.links if file_format(path) in FORMATS]
    outside = outside_notice(name, folder, [path for path in links if leads_out(path, folder)])
    return TableFolder(files, (_reads(name, files), *_passed_over(name, top, unnamed), *outside))


def split_named(path: Path) -> str | None:
    """Return the split that a file's name has as a word: ``train`` for ``imdb_train-00000-of-00002.parquet``."""
    words = re.split(r"[\W\d_]+", _stem(path).lower())
    splits = {SPLITS[word] for word in words if word in SPLITS}
    return splits.pop() if len(splits) == 1 else None


def _stem(path: Path) -> str:
    stem = path.stem if path.suffix.lower() == ".gz" else path.name
    return Path(stem).stem


def _tables_of(files: Sequence[Path]) -> list[Path]:
    """Return the tables among files; JSON files count where no others do, since settings are kept in such, too."""
    tables = [path for path in files if file_format(path) in FORMATS and path.name not in _SETTINGS]
    tables = [path for path in tables if not path.name.startswith(("_", "~$"))]  # ~$: open in Excel
    if all(file_format(path) == ".json" for path in tables):
        return tables
    return [path for path in tables if file_format(path) != ".json" or split_named(path)]


def _holds_classes(top: Entries) -> bool:
    """Whether a folder holds samples in two folders of classes, in itself or in a folder of a split."""
    classes = 0
    for folder in top.folders:
        inside = entries_of(folder)
        if folder.name.lower() in SPLITS and inside.folders:
            deeper = [entries_of(each) for each in inside.folders]
            if sum(any(sample_kind(path) for path in (*each.files, *each.broken)) for each in deeper) > 1:
                return True
        elif folder.name.lower() not in SPLITS or len(top.folders) > len(_splits_of(top)):
            classes += any(sample_kind(path) for path in (*inside.files, *inside.broken))
    return classes > 1


def _splits_of(top: Entries) -> list[Path]:
    return [folder for folder in top.folders if folder.name.lower() in SPLITS]


def _require_pieces(folder: Path, name: str, split: str | None, paths: Sequence[Path]) -> None:
    """Require that tables are pieces of one: their names differ by numbers alone, and no number is missing."""
    patterns = {(file_format(path), _NUMBER.sub("#", _UUID.sub("#", _stem(path).lower()))) for path in paths}
    if len(patterns) > 1 or len({_stem(path) for path in paths}) < len(paths):
        raise _ambiguous(folder, name, split, paths)
    numbered = [match for path in paths if (match := _PIECE_OF.search(path.name))]
    if numbered and len(numbered) == len(paths) and len(paths) != (count := int(numbered[0][2])):
        raise DataError(
            f"{len(paths):,} of {count:,} pieces",
            file=name,
            why=f"{numbered[0].string} says that there are {count:,}",
            fix="download the others, too",
        )


def _ambiguous(folder: Path, name: str, split: str | None, paths: Sequence[Path]) -> DataError:
    names = [str(path.relative_to(folder)) for path in paths]
    return DataError(
        f"which table {f'is {split}' if split else 'is to be read'}?",
        file=name,
        why=f"it holds {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}, which are not pieces of one table",
        fix=f"--data {Path(name) / names[0]}, or name them train.csv, validation.csv and test.csv",
    )


def _reads(name: str, files: Sequence[TableFile]) -> str:
    shown = [f"{file.path.name}{f' as {file.split}' if file.split else ''}" for file in files]
    return f"{name}: reads {', '.join(shown[:_SHOWN])}{f' and {len(shown) - _SHOWN:,} more' * (len(shown) > _SHOWN)}"


def _passed_over(name: str, top: Entries, unnamed: Sequence[Path]) -> list[str]:
    notices = []
    if unnamed:
        names = ", ".join(path.name for path in unnamed[:_SHOWN])
        notices.append(f"{name}: ignored {len(unnamed):,} table(s) that name no split: {names}")
    tables = set(_tables_of(top.files))
    # pictures there may be those that a table names
    left = [path for path in top.files if path not in tables and sample_kind(path) != "image"]
    others = Counter(path.suffix or "suffixless" for path in left)
    notices += [f"{name}: ignored {count:,} {suffix} file(s)" for suffix, count in sorted(others.items())]
    return notices
