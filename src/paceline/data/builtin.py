"""Data sets that need no download: ``builtin:docstrings``, ``builtin:digits`` and ``builtin:random``."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np

from paceline.contract.errors import DataError, nearest
from paceline.data.dataset import Origins, Tokens
from paceline.data.docstrings import LIBRARIES, MOST_PER_LIBRARY, collect
from paceline.data.sources.images import load, require_pillow, stack
from paceline.data.table import Table
from paceline.machine.facts import beyond_main_memory
from paceline.recipe.catalogue.tasks import ONE_CLASS
from paceline.recipe.parts import DataPart, RandomPart

PREFIX = "builtin:"

_FIRST_RANDOM_TOKEN = 100
"""Lower ids are special tokens in most vocabularies."""

_LARGEST = 2**31
"""Length of a text, or of a side of an image: more has no use, and numpy draws no numbers beyond 64 bits."""

_DRAWN_BYTES = 8
"""A token takes as much while it is drawn, and 2 or 4 bytes after."""

_ROW_BYTES = 100
"""What a row takes in addition to its tokens or pixels: its label as a number and as text, its origin."""


def read_builtin(part: DataPart) -> Table:
    """The table of a ``builtin:`` source.

    Raises:
        DataError: there is no such data set, or ``part.random`` asks for what cannot be.
    """
    return _READERS[_name(part)](part)


def builtin_fingerprint(part: DataPart) -> str:
    """Digest of everything that a ``builtin:`` source depends on, without reading it.

    Raises:
        DataError: there is no such data set.
    """
    name = _name(part)
    if name == "docstrings":
        packages = [library for library, package in LIBRARIES.items() if package]
        depends: object = [platform.python_version(), *map(version, packages)]
    elif name == "digits":
        depends = [version("scikit-learn"), part.image_size]
    else:
        depends = [version("numpy"), part.random.model_dump(mode="json")]
    return hashlib.sha256(json.dumps([name, depends]).encode()).hexdigest()


def _name(part: DataPart) -> str:
    name = part.source.removeprefix(PREFIX)
    if name not in _READERS:
        raise DataError(
            f"data.source = {part.source!r}: no such built-in data set",
            why=nearest(part.source, [PREFIX + known for known in _READERS]),
            fix=f"one of {', '.join(PREFIX + known for known in _READERS)}",
        )
    return name


def _docstrings(part: DataPart) -> Table:
    found = collect(most=MOST_PER_LIBRARY)
    files = sorted({one.file for one in found})
    index = {file: position for position, file in enumerate(files)}
    return Table(
        texts=[one.text for one in found],
        labels=[one.library for one in found],
        kind=ONE_CLASS,
        origins=Origins(
            tuple(files),
            np.array([index[one.file] for one in found], dtype=np.int32),
            np.array([one.line for one in found], dtype=np.int64),
        ),
        columns={"text": "docstring", "label": "library"},
    )


def _digits(part: DataPart) -> Table:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # scikit-learn's values are 0..16
    if part.image_size is not None:
        require_pillow(part.source)
        pixels = stack([load(digit, part.image_size, file=part.source, line=None, column=None) for digit in pixels])
    else:
        pixels = pixels[..., np.newaxis]
    return Table(
        images=pixels,
        labels=[str(digit) for digit in found.target],
        kind=ONE_CLASS,
        origins=_nowhere(part, len(pixels)),
        columns={"image": "image", "label": "digit"},
    )


def _random(part: DataPart) -> Table:
    shapes = part.random
    size = part.image_size
    if shapes.image is not None and size is not None and (size, size) != tuple(shapes.image[:2]):
        raise DataError(
            f"data.image_size = {size}: no effect on {part.source}",
            why="its images are made in the size of data.random.image",
            fix=f"leave data.image_size out, or --set data.random.image=[{size},{size},{shapes.image[2]}]",
        )
    _require_memory(shapes)
    random = np.random.default_rng(0)
    # shared out in turn, so that every class is there if there are enough samples, then shuffled
    labels = random.permutation(np.arange(shapes.samples) % shapes.classes)
    images = None
    if shapes.image is not None:
        images = random.integers(0, 256, size=(shapes.samples, *_positive(shapes.image)), dtype=np.uint8)
    return Table(
        tokens=None if images is not None else _random_tokens(shapes, random),
        images=images,
        labels=[str(label) for label in labels],
        kind=ONE_CLASS,
        origins=_nowhere(part, shapes.samples),
        columns={"label": "class"},
    )


def _require_memory(shapes: RandomPart) -> None:
    """Refuse shapes that would fill the main memory before they are drawn: at the worst the system ends the process."""
    if shapes.image is not None:
        sample_bytes = math.prod(_positive(shapes.image))
    else:
        sample_bytes = _DRAWN_BYTES * sum(_length_range(shapes)) // 2  # the mean length
    if why := beyond_main_memory(shapes.samples * (sample_bytes + _ROW_BYTES)):
        what = f"data.random.samples = {shapes.samples:,}: too many of this size"
        raise DataError(what, why=why, fix="give fewer or smaller samples, such as --set data.random.samples=512")


def _length_range(shapes: RandomPart) -> tuple[int, int]:
    """Return the shortest and the longest length in tokens."""
    shortest, longest = (shapes.length, shapes.length) if isinstance(shapes.length, int) else shapes.length
    if not 1 <= shortest <= longest <= _LARGEST:
        raise DataError(
            f"data.random.length = {shapes.length}: not a length in tokens",
            fix=f"give one length from 1 to {_LARGEST:,}, or the shortest and the longest",
        )
    return shortest, longest


def _random_tokens(shapes: RandomPart, random: np.random.Generator) -> Tokens:
    shortest, longest = _length_range(shapes)
    lengths = random.integers(shortest, longest + 1, size=shapes.samples)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
    flat = random.integers(_FIRST_RANDOM_TOKEN, shapes.vocabulary, size=int(offsets[-1]))
    narrow = flat.astype(np.uint16) if shapes.vocabulary <= 2**16 else flat.astype(np.uint32)
    return Tokens(flat=narrow, offsets=offsets, pad_id=0)


def _positive(image: Sequence[int]) -> Sequence[int]:
    if not 1 <= min(image) <= max(image) <= _LARGEST:
        what = f"data.random.image = {tuple(image)}: not the height, width and channels of an image"
        raise DataError(what, fix=f"give numbers from 1 to {_LARGEST:,}")
    return image


def _nowhere(part: DataPart, num_rows: int) -> Origins:
    return Origins((part.source,), np.zeros(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int64))


_READERS: dict[str, Callable[[DataPart], Table]] = {"docstrings": _docstrings, "digits": _digits, "random": _random}
