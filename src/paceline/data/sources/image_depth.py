"""Pixels as 8 bits of grey or colour, and an account of what pictures hold beyond that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_USUAL_BITS = (8, 10, 12, 14)
"""Bits that cameras and scanners use of 16."""

_FLAT = 16
"""Values that differ by less than this show nothing."""

_FRAMES = "picture(s) with several frames or pages, of which the first is read"
_TRANSPARENT = "picture(s) with transparent parts, which are read in the colours stored below them"
_DRAWN = "picture(s) whose transparency alone shows something, read on white or black, whichever shows it"


class UnreadableDepth(Exception):
    """Pixels that do not become 8 bits without a choice that is the user's."""

    def __init__(self, problem: str, why: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.why, self.fix = problem, why, fix


@dataclass
class Depth:
    """Makes 8-bit pictures, and counts those of which something is not read.

    Args:
        bits: how many of its 16 bits a grey picture uses; the upper 8 of these are read.
    """

    bits: int = 16
    _num_deep: int = 0
    _largest: int = 0
    _largest_colour: int = -1
    """In the upper 8 of 16 bits; -1 where no colour picture has 16."""
    _notes: dict[str, list[str]] = field(default_factory=dict)
    """Files by what is not read of them."""

    def eight_bit(self, opened: Any, file: str) -> Any:
        """Return an image of Pillow's upright, in mode L or RGB.

        Raises:
            UnreadableDepth: the pixels have 32 bits, or do not fit into ``bits``.
        """
        from PIL import ImageOps

        is_deep_colour = any("GB" in str(tile[3]) and ";16" in str(tile[3]) for tile in getattr(opened, "tile", ()))
        # of a picture of two lenses (MPO) the first is the photograph
        if getattr(opened, "is_animated", False) and opened.format != "MPO":
            self._note(_FRAMES, file)
        image = ImageOps.exif_transpose(opened) or opened
        if image.mode in ("L", "RGB"):
            shown = image
        elif image.mode.startswith(("I", "F")):
            return self._from_grey(image)
        else:
            shown = self._without_alpha(image, file)
        if is_deep_colour:
            self._note_deep_colour(shown)
        return shown

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each kind of picture of which something is not read."""
        sentences = [f"{len(files):,} {what}, such as {files[0]}" for what, files in self._notes.items()]
        if self.bits != 16 and not self._num_deep:
            sentences.append(f"data.image_bits = {self.bits} has no effect: no picture is grey with 16 bits")
        if self.bits == 16 and self._num_deep and self._largest < 1 << 15:
            used = next((bits for bits in _USUAL_BITS if self._largest < 1 << bits), 15)
            sentences.append(
                f"{self._num_deep:,} grey picture(s) of 16 bits use {used} of them (the largest value is"
                f" {self._largest:,} of 65,535), so they are dark, and of 256 levels {(self._largest >> 8) + 1} are"
                f" left; --set data.image_bits={used} reads their whole range"
            )
        if 0 <= self._largest_colour < 1 << 7:
            sentences.append(
                f"colour pictures of 16 bits are dark as they are read (the largest value is {self._largest_colour} of"
                " 255); scale them to 8 bits"
            )
        return tuple(sentences)

    def _note(self, what: str, file: str) -> None:
        self._notes.setdefault(what, []).append(file)

    def _from_grey(self, image: Any) -> Any:
        from PIL import Image

        values: NDArray[Any] = np.asarray(image)
        if image.mode == "F" or int(values.min()) < 0 or int(values.max()) >= 1 << 16:
            raise UnreadableDepth(
                "pixels of 32 bits",
                f"they are {'fractions' if image.mode == 'F' else 'numbers'} from {values.min():g} to {values.max():g},"
                " and which of these is white is not known",
                "scale them to 0..255, and save them with 8 bits",
            )
        largest = int(values.max())
        if largest >= 1 << self.bits:
            raise UnreadableDepth(
                f"a pixel of over {self.bits} bits",
                f"data.image_bits = {self.bits} holds up to {(1 << self.bits) - 1:,}, and the picture has {largest:,}",
                f"--set data.image_bits={next((bits for bits in _USUAL_BITS if largest < 1 << bits), 16)}",
            )
        self._num_deep += 1
        self._largest = max(self._largest, largest)
        # Pillow's own conversion would clip everything above 255 to white
        return Image.fromarray((values.astype(np.uint16) >> (self.bits - 8)).astype(np.uint8))

    def _note_deep_colour(self, image: Any) -> None:
        if self.bits != 16:
            raise UnreadableDepth(
                "a colour picture of 16 bits",
                f"Pillow reads the upper 8 of them, which data.image_bits = {self.bits} cannot scale",
                "save it with 8 bits a colour, scaled to 0..255",
            )
        self._largest_colour = max(self._largest_colour, int(np.asarray(image).max()))

    def _without_alpha(self, image: Any, file: str) -> Any:
        """An image without its transparency; a drawing that is in there alone is laid on what shows it."""
        from PIL import Image

        mode = "L" if image.mode in ("1", "LA", "La") else "RGB"
        if image.mode == "PA" or (image.mode == "P" and "transparency" in image.info):
            image = image.convert("RGBA")
        if image.mode in ("La", "RGBa"):
            image = image.convert(image.mode.upper())
        colours = image.convert(mode)
        if image.mode not in ("LA", "RGBA"):
            return colours
        alpha, values = image.getchannel("A"), np.asarray(colours)
        lowest, highest = alpha.getextrema()
        if lowest == 255:
            return colours
        if int(np.ptp(values, axis=(0, 1)).max()) >= _FLAT or highest - lowest < _FLAT:
            self._note(_TRANSPARENT, file)
            return colours
        self._note(_DRAWN, file)
        background = Image.new(mode, image.size, "white" if values.mean() < 128 else "black")
        return Image.composite(colours, background, alpha)
