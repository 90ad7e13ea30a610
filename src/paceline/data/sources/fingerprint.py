"""Digests by which a cache knows that rows would be read again as they were."""

from __future__ import annotations

import hashlib
import json

from paceline.contract.files import digest
from paceline.data.sources.arrow import files_of_saved, is_saved
from paceline.data.sources.cifar import files_of_cifar, is_cifar
from paceline.data.sources.folders import files_of
from paceline.data.sources.hub import PREFIX
from paceline.data.sources.lines import unreadable
from paceline.data.sources.locate import file_format, locate
from paceline.recipe.parts import DataPart

_READING = 4
"""Raised when reading the same bytes gives other rows than before."""

_FIELDS = ("text", "pair", "label", "split", "label_separator", "encoding", "delimiter", "image_size", "on_bad_row")
"""What changes the rows that are read; cells of ``splits``, ``max_length`` and the like come later."""


def source_fingerprint(part: DataPart) -> str | None:
    """Digest of the files' bytes and of the settings that matter for reading, without parsing anything.

    Moving files does not change it; renaming the files of a folder of samples does. None for sources that are not
    files (the Hub, builtins).

    Raises:
        DataError: a file is missing or of no known kind.
    """
    if part.source.startswith((PREFIX, "builtin:")):
        return None
    settings = part.model_dump(mode="json", include=set(_FIELDS))
    whole = hashlib.sha256(json.dumps([_READING, settings], sort_keys=True).encode())
    for setting, name in files_named(part):
        path = locate(name, f"data.{setting}")
        try:
            if path.is_dir():
                found_by = files_of_saved if is_saved(path) else files_of_cifar if is_cifar(path) else files_of
                for file in found_by(path, name):
                    found = f"\n{setting} {file.relative_to(path).as_posix()} {digest(file)}"
                    whole.update(found.encode("utf-8", "surrogateescape"))  # a file's name is bytes, UTF-8 or not
            else:
                whole.update(f"\n{setting} {file_format(path)} {digest(path)}".encode())
        except OSError as error:
            raise unreadable(name, error) from None
    return whole.hexdigest()


def files_named(part: DataPart) -> list[tuple[str, str]]:
    """(setting, path) of every file or folder that the recipe names."""
    named = (("source", part.source), ("validation", part.validation), ("test", part.test))
    return [(setting, name) for setting, name in named if name]
