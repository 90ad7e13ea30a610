"""Single images: opened, checked, resized, as arrays."""

from __future__ import annotations

import functools
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
from paceline.data.sources.image_depth import Depth, UnreadableDepth
from paceline.data.sources.lines import refuse_lfs_note
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
    """Whether a cell holds an image: a file's path, one of Pillow's, the Hub's ``{"bytes", "path"}``, an array.

    Arrays are uint8 or boolean [height, width] or [height, width, 1, 3 or 4], or uint16 [height, width].
    """
    if isinstance(value, Path):
        return True
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    if isinstance(value, np.ndarray):
        if value.ndim == 3 and value.shape[2] in (1, 3, 4):
            return bool(value.dtype == np.uint8)
        return value.ndim == 2 and value.dtype in (np.uint8, np.uint16, np.bool_)
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
    depth: Depth | None = None,
    file: str,
    line: int | None,
    column: str | None,
) -> Pixels:
    """The pixels of a file's path or of a cell for which ``is_image`` holds.

    Grey images have no channel axis; palettes, transparency and 16-bit grey become 8-bit colour or grey; photographs
    are turned upright; of an animation the first frame is taken. With ``image_size`` both sides are resized to it;
    ``picture`` resizes and crops as it does. ``depth`` says how 16 bits become 8, and notes what is not read.

    Raises:
        DataError: not a whole image, or one of implausibly many pixels; names ``file``, ``line`` and ``column``.
    """
    from PIL import Image

    if picture is None and isinstance(value, np.ndarray) and _is_ready(value, image_size):
        return value[:, :, 0] if value.ndim == 3 and value.shape[2] == 1 else value
    place: dict[str, Any] = {"file": file, "line": line, "column": column}
    try:
        with warnings.catch_warnings():
            # Pillow warns of damaged metadata, which the pixels do not depend on (damaged pixels raise), and of
            # pictures that would fill the memory, which are refused here; both already while a file is opened
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _opened(value) as image:
                upright = (depth or Depth()).eight_bit(image, file)
            if picture is not None:
                return picture(upright)
            if image_size:
                upright = upright.resize((image_size, image_size), Image.Resampling.BILINEAR)
            return np.array(upright, dtype=np.uint8)
    except UnreadableDepth as error:
        raise DataError(error.problem, why=error.why, fix=error.fix, **place) from None
    except FileNotFoundError:
        raise DataError("no such picture", why=f"there is no file {value}", fix="correct its name", **place) from None
    except (
        *(OSError, EOFError, SyntaxError, ValueError, zlib.error),
        *(struct.error, TypeError, KeyError, IndexError),  # Pillow lets these out for damaged EXIF
        *(Image.DecompressionBombError, Image.DecompressionBombWarning),
    ) as error:
        if isinstance(value, Path):
            refuse_lfs_note(value, file)
        fix = "open it in a viewer; save it again as PNG, or remove it"
        raise DataError("not a whole image", why=str(error), fix=fix, **place) from None


def _is_ready(array: NDArray[Any], image_size: int | None) -> bool:
    """Whether an array has the pixels of an image, of the size that is asked for."""
    height, width = array.shape[:2]
    is_grey_or_colour = array.ndim == 2 or array.shape[2] in (1, 3)
    return (
        array.dtype == np.uint8 and is_grey_or_colour and image_size in (None, height) and image_size in (None, width)
    )


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
        return Image.open(value, formats=_formats())
    if isinstance(value, Mapping):
        return Image.open(io.BytesIO(value["bytes"]), formats=_formats())
    if isinstance(value, np.ndarray):
        return Image.fromarray(value[:, :, 0] if value.ndim == 3 and value.shape[2] == 1 else value)
    # copied, because leaving the with block closes what it was given, and this one is the user's
    return value.copy()  # type: ignore[attr-defined]


@functools.cache
def _formats() -> tuple[str, ...]:
    """Formats that are opened, whatever a file is called: others may start a program, as EPS does Ghostscript."""
    from PIL import Image

    Image.init()
    read = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
    return tuple(name for name in read if name in Image.OPEN)
