"""Single images: opened, checked, resized, as arrays."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError
from paceline.data.sources.rows import not_installed

SUFFIXES = frozenset(
    {
        *(".png", ".apng", ".jpg", ".jpeg", ".jfif", ".jpe", ".jfi", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif"),
    }
)

Pixels = NDArray[np.uint8]
"""[height, width] when grey, [height, width, 3] in colour."""


def is_image(value: object) -> bool:
    """Whether a cell holds an image: a file's path, one of Pillow's, the Hub's ``{"bytes", "path"}``, a uint8 array."""
    if isinstance(value, Path):
        return True
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3)))
    return hasattr(value, "convert") and hasattr(value, "getbands")


def require_pillow(name: str) -> None:
    """Raise a DataError with the command to type when Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise not_installed("images need Pillow", "images", name) from None


class Picture(Protocol):
    """What a model's own image processor does to an image before its pixels become floats."""

    @property
    def key(self) -> str:
        """Identifies it: equal keys give equal pixels."""

    def __call__(self, image: Any) -> Pixels:
        """Pixels [height, width, channels] of an upright image of Pillow's, in mode L or RGB."""


def load(
    value: object,
    image_size: int | None,
    picture: Picture | None = None,
    *,
    file: str,
    line: int | None,
    column: str | None,
) -> Pixels:
    """The pixels of a file's path or of a cell for which ``is_image`` holds.

    Grey images have no channel axis; palettes, transparency and 16-bit grey become 8-bit colour or grey; photographs
    are turned upright; of an animation the first frame is taken. With ``image_size`` both sides are resized to it;
    ``picture`` resizes and crops as it does.

    Raises:
        DataError: not a whole image, or one of implausibly many pixels; names ``file``, ``line`` and ``column``.
    """
    from PIL import Image, ImageOps

    if (
        picture is None
        and isinstance(value, np.ndarray)
        and value.shape[:2]
        == (
            image_size or value.shape[0],
            image_size or value.shape[1],
        )
    ):
        return value[:, :, 0] if value.ndim == 3 and value.shape[2] == 1 else value
    try:
        with warnings.catch_warnings():
            # Pillow warns of damaged metadata, which the pixels do not depend on (damaged pixels raise), and of
            # pictures that would fill the memory, which are refused here; both already while a file is opened
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _opened(value) as image:
                upright = _eight_bit(ImageOps.exif_transpose(image) or image)
            if picture is not None:
                return picture(upright)
            if image_size:
                upright = upright.resize((image_size, image_size), Image.Resampling.BILINEAR)
            return np.array(upright, dtype=np.uint8)
    except (
        *(OSError, EOFError, SyntaxError, ValueError, zlib.error),
        *(struct.error, TypeError, KeyError, IndexError),  # Pillow lets these out for damaged EXIF
        *(Image.DecompressionBombError, Image.DecompressionBombWarning),
    ) as error:
        raise DataError(
            "not a whole image",
            file=file,
            line=line,
            column=column,
            why=str(error),
            fix="open it in a viewer; save it again as PNG, or remove it",
        ) from None


def stack(images: list[Pixels]) -> Pixels:
    """Images of one size as [n, height, width, channels]: 1 channel if all are grey, else 3. Empties the list."""
    height, width = images[0].shape[:2]
    channels = 3 if any(image.ndim == 3 for image in images) else 1
    whole = np.empty((len(images), height, width, channels), dtype=np.uint8)
    for index in reversed(range(len(images))):
        # popped one by one, so that the images are not held twice
        image = images.pop()
        whole[index] = image[:, :, None] if image.ndim == 2 else image
    return whole


def check_size(shape: Sequence[int], first: Sequence[int], *, file: str, line: int | None) -> None:
    """Raise a DataError when an image's size differs from the first one's."""
    if tuple(shape[:2]) != tuple(first[:2]):
        side = min(*shape[:2], *first[:2])
        raise DataError(
            "the images are of different sizes",
            file=file,
            line=line,
            why=f"this one is {shape[1]} × {shape[0]} pixels, the first {first[1]} × {first[0]}",
            fix=f"--set data.image_size={max(8, side)} resizes all of them",
        )


def _opened(value: object) -> Any:
    from PIL import Image

    if isinstance(value, Path):
        return Image.open(value)
    if isinstance(value, Mapping):
        return Image.open(io.BytesIO(value["bytes"]))
    if isinstance(value, np.ndarray):
        return Image.fromarray(value[:, :, 0] if value.ndim == 3 and value.shape[2] == 1 else value)
    # copied, because leaving the with block closes what it was given, and this one is the user's
    return value.copy()  # type: ignore[attr-defined]


def _eight_bit(image: Any) -> Any:
    """An image in mode L or RGB."""
    from PIL import Image

    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith("I;16"):
        # convert("L") would clip everything above 255 to white
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}) have no agreed range")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")
