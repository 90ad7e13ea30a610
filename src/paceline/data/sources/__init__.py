"""Where rows come from: files, folders, the Hub, or memory; ``read`` gives them checked, as one table."""

from __future__ import annotations

from paceline.data.sources.fingerprint import file_states, require_unchanged, source_fingerprint
from paceline.data.sources.images import Picture
from paceline.data.sources.locate import fitting
from paceline.data.sources.opening import locate_files
from paceline.data.sources.reader import read, read_unlabelled

__all__ = [
    "Picture",
    "file_states",
    "fitting",
    "locate_files",
    "read",
    "read_unlabelled",
    "require_unchanged",
    "source_fingerprint",
]
