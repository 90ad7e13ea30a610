"""Images as normalised floats, changed at random and augmented on the device; ``kernels/images.py`` carries it out.

Shapes: S samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.resident import resident_images
from paceline.data.sample_layout import SampleLayout
from paceline.data.transfer import Arrays, Shapes, to_device
from paceline.kernels.images import images as gathered_images
from paceline.recipe.parts import AugmentPart
from paceline.seams import Batch, Ids, Size

_MANY = 2**62
"""Integers are drawn below this and divided with remainder, so that their bias is below 2^-50."""


@final
class Augmentation:
    """Mirror, padded crop and cutout of images of one size.

    Args:
        part: what is asked for.
        height: of the images, in pixels.
        width: of the images, in pixels.
        device: where the batches are.

    Raises:
        RecipeError: it could leave nothing of images of this size.
    """

    def __init__(self, part: AugmentPart, height: int, width: int, device: torch.device) -> None:
        _require_room(part, height, width)
        self.crop, self.cutout = part.crop, part.cutout
        self._generator = torch.Generator(device)
        corner, centre = 2 * part.crop + 1, (height, width) if part.cutout else (1, 1)
        self._choices = torch.tensor([[2 if part.flip else 1], [corner], [corner], *([n] for n in centre)]).to(device)

    def draw(self, samples: int, seed: int) -> Tensor:
        """Random numbers for so many images, as ``paceline::images`` takes them, int64 [5, S]; what is not asked for
        is 0. Equal seeds give equal numbers on one kind of device."""
        generator = self._generator.manual_seed(seed)
        numbers = torch.randint(_MANY, (5, samples), generator=generator, device=generator.device)
        return numbers.remainder_(self._choices)


def _require_room(part: AugmentPart, height: int, width: int) -> None:
    for name, pixels, usual in (("crop", part.crop, "an eighth"), ("cutout", part.cutout, "half")):
        if pixels >= min(height, width):
            raise RecipeError(
                f"data.augment.{name} = {pixels}",
                f"the images are {height} x {width} pixels: it could leave nothing of them",
                f"set data.augment.{name} below {min(height, width)}, usually to {usual} of it",
            )


@final
class ImageLayout(SampleLayout):
    """Images as normalised channels-first floats.

    A micro-batch of no samples is two of weight 0, for batch normalisation refuses to train on one.

    Args:
        images: the samples, uint8.
        labels: as in ``Dataset``.
        device: where batches are put.
        mean: per channel, of values scaled to 0..1.
        deviation: standard deviation per channel.
        resident: keep all pixels on the device and gather there.
        augment: random changes of the batches that are given a ``draw``.
        memory_format: how [S, C, H, W] lies in memory; ``torch.channels_last`` saves a copy, since pixels come so.

    Raises:
        RecipeError: the augmentation leaves nothing of images of this size.
    """

    def __init__(
        self,
        images: Images,
        labels: NDArray[Any],
        device: torch.device,
        *,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        resident: bool = False,
        augment: AugmentPart | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(labels, device, resident_images(images, device) if resident else None)
        self._settings = {"mean": mean, "deviation": deviation, "augment": augment, "memory_format": memory_format}
        self._images, self._format = images, memory_format
        _, height, width, channels = images.pixels.shape
        self._mean, self._deviation = (
            torch.tensor(each[:channels], device=device).view(-1, 1, 1).expand(channels, 1, 1).contiguous()
            for each in (mean, deviation)
        )
        self._augmentation = None
        if augment is not None and augment.changes_each:
            self._augmentation = Augmentation(augment, height, width, device)
        self._stand_in = np.arange(2) % max(1, len(images.pixels))

    def size(self, ids: Ids) -> Size:
        return Size(len(ids), len(ids), len(ids) or len(self._stand_in))

    def sorted(self, ids: Ids) -> Ids:
        return ids

    def _batch(self, values: dict[str, Tensor], labels: Tensor, weights: Tensor, draw: int | None) -> Batch:
        change, draws = self._augmentation, None
        if change is not None and draw is not None:
            draws = change.draw(len(weights), draw)
        crop, cutout = (change.crop, change.cutout) if change else (0, 0)
        last = self._format is torch.channels_last
        pixels, at = values["pixels"], values.get("at")
        normalised = gathered_images(pixels, at, draws, self._mean, self._deviation, crop, cutout, last)
        return Batch({"pixel_values": normalised}, labels, weights)

    def _gathered(self, ids: Ids, slots: int | None, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        at = to_device(ids, self._device)
        return {"pixels": pixels, "at": at, "labels": labels.index_select(0, at)}

    def _shapes(self, ids: Ids) -> Shapes:
        return {"pixels": ((len(ids), *self._images.pixels.shape[1:]), torch.uint8)}

    def _fill(self, ids: Ids, arrays: Arrays) -> None:
        # straight into pinned memory, which numpy does in no other mode
        np.take(self._images.pixels, ids, axis=0, out=arrays["pixels"], mode="wrap")
