"""Digests by which a cache knows that rows would be read again as they were."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.contract.files import digest
from paceline.data.sources.entries import is_broken
from paceline.data.sources.formats import file_format
from paceline.data.sources.hub import PREFIX
from paceline.data.sources.lines import unreadable
from paceline.data.sources.locate import files_of_folder, locate
from paceline.recipe.parts import DataPart

_READING = 7
"""Raised when reading the same bytes gives other rows than before."""

_FIELDS = (
    *("text", "pair", "label", "split", "label_separator", "decimal"),
    *("encoding", "delimiter", "quote", "image_size", "image_bits", "on_bad_row"),
)
"""What changes the rows that are read; cells of ``splits``, ``max_length`` and the like come later."""


def source_fingerprint(part: DataPart) -> str | None:
    """Digest of the files' bytes and of the settings that matter for reading, without parsing anything.

    Moving files does not change it; renaming the files of a folder of samples does. None for sources that are not
    files (the Hub, builtins).

    Raises:
        DataError: a file is missing or of no known kind.
    """
    if not _is_files(part):
        return None
    settings = part.model_dump(mode="json", include=set(_FIELDS))
    whole = hashlib.sha256(json.dumps([_READING, settings], sort_keys=True).encode())
    for setting, name, file, described in _source_files(part):
        try:
            content = f"\n{setting} {described} {'' if is_broken(file) else digest(file)}"
        except OSError as error:
            raise unreadable(name, error) from None
        whole.update(content.encode("utf-8", "surrogateescape"))  # a file's name is bytes, UTF-8 or not
    return whole.hexdigest()


FileStates = Mapping[str, tuple[int, ...]]
"""Size, modification time and change time of every file of a source, and of every link that leads to one."""


def file_states(part: DataPart) -> FileStates:
    """Return the state of every file of the source; empty for sources that are not files.

    Raises:
        DataError: a file is missing or of no known kind.
    """
    states: dict[str, tuple[int, ...]] = {}
    for _, name, file, _ in _source_files(part) if _is_files(part) else ():
        try:
            link = file.lstat()
            target = link if is_broken(file) else file.stat()
        except OSError as error:
            raise unreadable(name, error) from None
        states[str(file)] = (*_state_of(link), *_state_of(target))
    return states


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_unchanged(part: DataPart, states: FileStates, fingerprint: str | None = None) -> None:
    """Require that no file of the source was written to, replaced, added or removed since ``states`` were taken.

    No program can set a change time, so that a file which was replaced and put back is noticed too. Where the file
    system's clock is too coarse, the bytes tell.

    Args:
        part: the source.
        states: of ``file_states``, from before the first byte was read.
        fingerprint: what ``source_fingerprint`` gave then; None: the bytes are not compared.

    Raises:
        DataError: a file is missing, or is no longer what it was.
    """
    after = file_states(part)
    changed = {name for name in states.keys() | after.keys() if states.get(name) != after.get(name)}
    if states and not changed and fingerprint is not None and source_fingerprint(part) != fingerprint:
        changed = {part.source}
    if changed:
        raise DataError(
            "the data changed while they were being read",
            file=min(changed),
            why="part of what was read may be old, and part new",
            fix="start again once no other program writes to them",
        )


def _source_files(part: DataPart) -> Iterator[tuple[str, str, Path, str]]:
    """Setting, name as written, path and description of every file that is read."""
    for setting, name in files_named(part):
        path = locate(name, f"data.{setting}")
        try:
            if not path.is_dir():
                yield setting, name, path, file_format(path)
                continue
            files = files_of_folder(path, name)
        except OSError as error:
            raise unreadable(name, error) from None
        for file in files:
            yield setting, name, file, file.relative_to(path).as_posix()


def _is_files(part: DataPart) -> bool:
    return not part.source.startswith((PREFIX, "builtin:"))


def files_named(part: DataPart) -> list[tuple[str, str]]:
    """(setting, path) of every file or folder that the recipe names."""
    named = (("source", part.source), ("validation", part.validation), ("test", part.test))
    return [(setting, name) for setting, name in named if name]
