"""A pretrained model's own image processor, split in two: geometry on the host, an affine map on the device.

A processor of transformers decodes nothing: it resizes, crops, and turns whole numbers into floats. Its geometry is
run as it is, with what makes floats switched off, so that pixels stay whole numbers and may live on the device. What
is left is measured on a black and a white image: value = (pixel / 255 - mean) / std. That the two together are the
processor is shown on the first images of the data, not assumed.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import ModelError, in_a_line
from paceline.models.config import read_json

FILE = "preprocessor_config.json"

TOLERANCE = 1e-5
"""Largest difference between the processor's values and ours, which lie between about -3 and 3."""

_PROVEN_ON = 8
"""Images on which the two are compared."""

_MAKE_FLOATS = ("do_rescale", "do_normalize", "include_top")
"""Settings of a processor that turn pixels into floats."""

_PROBE = 320
"""Pixels a side of the black and the white image: more than models take, so that nothing is filled up."""


@final
class Processor:
    """What ``open_processor`` found.

    Attributes:
        key: digest of all that decides what the pixels become.
        mean: a channel, of pixels scaled to 0..1.
        std: a channel.
        shape: height, width and channels of its pixels, where every image comes out alike; None where not.
    """

    def __init__(self, whole: Any, what: str, key: str) -> None:
        self.key, self._whole, self._what = key, whole, what
        self._geometry = copy.deepcopy(whole)
        for name in _MAKE_FLOATS:
            if hasattr(self._geometry, name):
                setattr(self._geometry, name, False)
        self._left_to_prove, self._lock = _PROVEN_ON, threading.Lock()
        black, white = (self._values(_one_colour(_PROBE, _PROBE, level)) for level in (0, 255))
        self.mean, self.std = self._affine(black, white)
        wide = self._pixels(_one_colour(_PROBE, _PROBE * 3 // 2, 0))
        alike = wide.shape == (black.shape[1], black.shape[2], black.shape[0])
        self.shape = (wide.shape[0], wide.shape[1], wide.shape[2]) if alike else None

    def __call__(self, image: Any) -> NDArray[np.uint8]:
        """Pixels [height, width, channels] of one of Pillow's images, as the model is to see it.

        Raises:
            ModelError: the processor does something that is no geometry and no affine map a channel.
        """
        image = image.convert("RGB")
        pixels = self._pixels(image)
        with self._lock:
            proves, self._left_to_prove = self._left_to_prove > 0, self._left_to_prove - 1
        if proves:
            ours = (pixels.transpose(2, 0, 1) / 255 - _channels(self.mean)) / _channels(self.std)
            theirs = self._values(image)
            if theirs.shape != ours.shape or np.abs(theirs - ours).max(initial=0) > TOLERANCE:
                raise self._refused("its values are not (pixel / 255 - mean) / std")
        return pixels

    def settings(self) -> dict[str, Any]:
        """The content of its ``preprocessor_config.json``, for a saved model."""
        found: dict[str, Any] = json.loads(self._whole.to_json_string())
        return found

    def _pixels(self, image: Any) -> NDArray[np.uint8]:
        found = _ran(self._geometry, image, self._refused)
        pixels = np.rint(found)
        if np.abs(found - pixels).max(initial=0) > 0 or pixels.min(initial=0) < 0 or pixels.max(initial=0) > 255:
            raise self._refused("its pixels are no whole numbers from 0 to 255 before it scales them")
        return np.ascontiguousarray(pixels.astype(np.uint8).transpose(1, 2, 0))

    def _values(self, image: Any) -> NDArray[np.float64]:
        return _ran(self._whole, image, self._refused)

    def _affine(
        self, black: NDArray[np.float64], white: NDArray[np.float64]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        _, height, width = black.shape
        low, high = (each[:, height // 2, width // 2] for each in (black, white))  # inside whatever is filled up
        if (high == low).any():
            raise self._refused("it makes white as dark as black")
        std = 1 / (high - low)
        return tuple((-low * std).tolist()), tuple(std.tolist())

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"{self._what}: its image processor ({type(self._whole).__name__}) cannot be used",
            why,
            "--set data.image_size=224 resizes the images without it, and normalises by its mean and deviation",
        )


def open_processor(folder: Path, what: str, *, trust_remote_code: bool = False) -> Processor | None:
    """The image processor in a model's folder; None where there is none.

    Args:
        folder: holds ``preprocessor_config.json``.
        what: names the model, for messages.
        trust_remote_code: whether the processor may be code that came with the model.

    Raises:
        ModelError: the file is damaged, or the processor gives something else than one picture of numbers.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    written = read_json(path)
    if not isinstance(written, dict):
        raise ModelError(f"{path}: no settings of an image processor", f"found {type(written).__name__}")
    import transformers
    from transformers import AutoImageProcessor

    try:
        with _quiet():
            whole = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever transformers meets in it
        raise ModelError(
            f"{what}: its image processor cannot be loaded",
            in_a_line(error),
            "--set data.image_size=224 resizes the images without it",
        ) from error
    # of the processor that was loaded: the file may be another by now
    parts = [type(whole).__module__, type(whole).__name__, transformers.__version__, whole.to_json_string()]
    return Processor(whole, what, hashlib.sha256("\n".join(parts).encode()).hexdigest())


def _ran(processor: Any, image: Any, refused: Any) -> NDArray[np.float64]:
    """What a processor makes of one image, [channels, height, width]."""
    try:
        with _quiet():
            made = processor(image, return_tensors="np")
    except Exception as error:  # whatever a processor meets in its settings
        raise refused(f"{type(error).__name__}: {error}") from error
    if set(made) != {"pixel_values"}:
        raise refused(f"it gives {', '.join(sorted(made))}, where a model of pictures takes pixel_values alone")
    found = np.asarray(made["pixel_values"], dtype=np.float64)
    if found.ndim != 4 or len(found) != 1 or found.shape[1] not in (1, 3):
        raise refused(f"it gives numbers of shape {list(found.shape)} for one image")
    one: NDArray[np.float64] = found[0]
    return one


def _one_colour(height: int, width: int, level: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (width, height), (level,) * 3)


def _channels(values: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array(values)[:, None, None]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remark on whether torchvision or Pillow does the work."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
