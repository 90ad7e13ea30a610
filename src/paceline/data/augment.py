"""Random changes of training images: what is drawn for a batch. Carried out by ``kernels/images.py``.

Shapes: S samples.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.recipe.parts import AugmentPart

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
