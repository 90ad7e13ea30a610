"""Random changes of training images, a whole batch at once on the device, in few kernels.

Shapes: S samples, H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import RecipeError
from paceline.recipe.parts import AugmentPart

_MANY = 2**62
"""Integers are drawn below this and divided with remainder, so that their bias is below 2^-50."""


@dataclass(frozen=True)
class Draws:
    """The random numbers behind one batch; what is not asked for is 0."""

    mirrored: Tensor
    """bool [S]: whether left and right change places, after the crop."""
    corners: Tensor
    """int64 [2, S]: row and column, 0 to 2 * crop, at which the window begins in the image with its black border."""
    centres: Tensor
    """int64 [2, S]: row and column of the middle of the blank square."""


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
        self._part, self._height, self._width = part, height, width
        self._generator = torch.Generator(device)
        corner, centre = 2 * part.crop + 1, (height, width) if part.cutout else (1, 1)
        self._choices = torch.tensor([[2 if part.flip else 1], [corner], [corner], *([n] for n in centre)]).to(device)
        self._last = torch.tensor([[height - 1], [width - 1]], device=device)
        # one square in the middle of a canvas; a window of the image's size on it is the mask of a square elsewhere
        canvas = torch.zeros(2 * height - 1, 2 * width - 1, dtype=torch.bool)
        top, left = height - 1 - part.cutout // 2, width - 1 - part.cutout // 2
        canvas[top : top + part.cutout, left : left + part.cutout] = True
        self._masks = canvas.to(device).unfold(0, height, 1).unfold(1, width, 1)

    def draw(self, samples: int, seed: int) -> Draws:
        """Random numbers for so many images; equal seeds give equal numbers on one kind of device."""
        generator = self._generator.manual_seed(seed)
        numbers = torch.randint(_MANY, (5, samples), generator=generator, device=generator.device)
        numbers.remainder_(self._choices)
        return Draws(numbers[0].bool(), numbers[1:3], numbers[3:5])

    def rearranged(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Images cropped and mirrored; what the window uncovers is 0, black before normalisation.

        The crop is one of the image with a border of zeros (He et al. 2016, arXiv:1512.03385, section 4.2).

        Args:
            pixels: [S, H, W, C].
            draws: for S samples.

        Returns:
            [S, C, H, W]; may be a view of ``pixels``.
        """
        images = pixels.permute(0, 3, 1, 2)
        if self._part.crop:
            bordered = pad(pixels, (0, 0, *[self._part.crop] * 4))
            windows = bordered.unfold(1, self._height, 1).unfold(2, self._width, 1)  # a view: [S, row, column, C, H, W]
            images = windows[torch.arange(len(pixels), device=pixels.device), draws.corners[0], draws.corners[1]]
        if self._part.flip:
            images = torch.where(draws.mirrored[:, None, None, None], images.flip(-1), images)
        return images

    def blanked(self, images: Tensor, draws: Draws) -> Tensor:
        """Blank a square in each normalised image, in place: 0 there is the mean colour.

        The middle of the square may be any pixel, so that it may reach beyond the border (DeVries and Taylor 2017,
        arXiv:1708.04552).

        Args:
            images: float [S, C, H, W].
            draws: for S samples.
        """
        if not self._part.cutout:
            return images
        offsets = self._last - draws.centres
        return images.masked_fill_(self._masks[offsets[0], offsets[1]][:, None], 0)


def _require_room(part: AugmentPart, height: int, width: int) -> None:
    for name, pixels, usual in (("crop", part.crop, "an eighth"), ("cutout", part.cutout, "half")):
        if pixels >= min(height, width):
            raise RecipeError(
                f"data.augment.{name} = {pixels}",
                f"the images are {height} x {width} pixels: it could leave nothing of them",
                f"set data.augment.{name} below {min(height, width)}, usually to {usual} of it",
            )
