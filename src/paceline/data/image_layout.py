"""Images as normalised floats, changed at random and augmented on the device; ``kernels/images.py`` carries it out.

Shapes: S samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.filler import Ones, as_filler
from paceline.data.resident import resident_images
from paceline.data.transfer import Arrays, ReadAhead, Shapes, to_device, torch_dtype
from paceline.kernels.images import images as gathered_images
from paceline.recipe.parts import AugmentPart
from paceline.seams import Batch, Ids, Layout, Size

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
class ImageLayout(Layout):
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
        seed: of what is drawn once for the whole run.
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
        self._images, self._labels, self._device, self._format = images, labels, device, memory_format
        self._normalisation, self._augment = (mean, deviation), augment
        _, height, width, channels = images.pixels.shape
        self._mean, self._deviation = (
            torch.tensor(each[:channels], device=device).view(-1, 1, 1).expand(channels, 1, 1).contiguous()
            for each in (mean, deviation)
        )
        self._augmentation = None
        if augment is not None and augment.changes_each:
            self._augmentation = Augmentation(augment, height, width, device)
        self._stand_in = np.arange(2) % max(1, len(images.pixels))
        self._resident = (resident_images(images, device), torch.tensor(labels, device=device)) if resident else None
        self.reads_ahead = not resident and device.type != "cpu"
        self._ones = Ones(device)
        self._ahead = ReadAhead(self._shapes, self._fill, device, threaded=self.reads_ahead)

    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None, epoch: int = 0) -> Batch:
        if not len(ids):
            return as_filler(self.collate(self._stand_in))
        at: Tensor | None = None
        if self._resident is not None:
            at = to_device(ids, self._device)
            pixels, labels = self._resident[0], self._resident[1].index_select(0, at)
        else:
            sent = self._ahead.take(ids)
            pixels, labels = sent["pixels"], sent["labels"]
        change, draws = self._augmentation, None
        if change is not None and draw is not None:
            draws = change.draw(len(ids), draw)
        crop, cutout = (change.crop, change.cutout) if change else (0, 0)
        last = self._format is torch.channels_last
        values = gathered_images(pixels, at, draws, self._mean, self._deviation, crop, cutout, last)
        return Batch({"pixel_values": values}, labels, self._ones(len(ids)))

    def over(self, inputs: Images, labels: NDArray[Any]) -> ImageLayout:
        return ImageLayout(
            inputs,
            labels,
            self._device,
            mean=self._normalisation[0],
            deviation=self._normalisation[1],
            augment=self._augment,
            memory_format=self._format,
        )

    def expect(self, ids: Sequence[Ids]) -> None:
        self._ahead.expect([each for each in ids if len(each)])

    def close(self) -> None:
        self._ahead.close()

    def size(self, ids: Ids) -> Size:
        return Size(len(ids), len(ids), len(ids) or len(self._stand_in))

    def sorted(self, ids: Ids) -> Ids:
        return ids

    def _shapes(self, ids: Ids) -> Shapes:
        return {
            "pixels": ((len(ids), *self._images.pixels.shape[1:]), torch.uint8),
            "labels": ((len(ids), *self._labels.shape[1:]), torch_dtype(self._labels)),
        }

    def _fill(self, ids: Ids, arrays: Arrays) -> None:
        arrays["labels"][...] = self._labels[ids]  # an id out of range stops here
        # straight into pinned memory, which numpy does in no other mode
        np.take(self._images.pixels, ids, axis=0, out=arrays["pixels"], mode="wrap")
