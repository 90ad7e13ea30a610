"""Kinds of files of data, by their suffixes."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.data.sources.images import SUFFIXES as IMAGE_SUFFIXES

DOWNLOADS = ("imdb", "cifar10")
"""Folders that ``paceline data`` writes, by the names of their data sets."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods")
BINARY = (".parquet", ".arrow", *WORKBOOKS)
"""Formats that are not read out of a .gz file."""
FORMATS = (*DELIMITERS, *JSON_LINES, ".json", *BINARY)
"""Formats of tables."""

TEXT_SUFFIXES = frozenset({".txt", ".text"})
"""Suffixes of files that hold one text each."""


def file_format(path: Path) -> str:
    """Return the suffix that says how to read a file, without that of compression: ``.csv`` for ``a.csv.gz``."""
    suffix = path.suffix.lower()
    if suffix != ".gz":
        return suffix
    inner = Path(path.stem).suffix.lower()
    return "" if inner in BINARY else inner


def sample_kind(path: Path) -> str:
    """Return ``text`` or ``image`` for a file that is one sample; empty for all others."""
    suffix = path.suffix.lower()
    return "text" if suffix in TEXT_SUFFIXES else "image" if suffix in IMAGE_SUFFIXES else ""


_NUMBER_SUFFIX = re.compile(r"\.[0-9a-f]*\d[0-9a-f]*")
_IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_FIRST_BYTES = 4096


def kind_by_content(path: Path) -> str:
    """Return ``text`` or ``image`` for a file without a suffix, or with a number or a hash as such; empty for others.

    A file that cannot be opened is a text, of which its reader reports the error.
    """
    if path.suffix and not _NUMBER_SUFFIX.fullmatch(path.suffix.lower()):
        return ""
    try:
        with path.open("rb") as file:
            first = file.read(_FIRST_BYTES)
    except OSError:
        return "text"
    if first.startswith(_IMAGE_STARTS):
        return "image"
    return "" if b"\0" in first else "text"
