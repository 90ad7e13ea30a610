"""What of a text is kept that has more tokens than a model is given at once. Numpy only.

Source: Sun et al., How to Fine-Tune BERT for Text Classification, arXiv 1905.05583, section 5.3: of 510 tokens the
first 128 and the last 382 beat the first 510 and the last 510; and windows, whose results are joined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError
from paceline.recipe.parts import DataPart

Places = NDArray[np.int64]
"""Positions in a text that are kept, in their order."""


@final
@dataclass(frozen=True, kw_only=True)
class Overflow:
    """The choice: what is kept of a text that is too long.

    Args:
        kind: ``head``, ``tail``, ``head+tail`` or ``windows``.
        head: with ``head+tail``, the share of the kept tokens that stand at the text's beginning.
        stride: with ``windows``, by how much neighbours overlap: a share of a window below 1, or a number of tokens.
        max_windows: of a text; None: as many as it takes.
    """

    kind: str = "head"
    head: float = 0.25
    stride: float = 0.25
    max_windows: int | None = None

    @classmethod
    def of(cls, part: DataPart) -> Overflow:
        """As a recipe has it."""
        return cls(kind=part.overflow, head=part.head, stride=part.stride, max_windows=part.max_windows)

    @property
    def has_windows(self) -> bool:
        """Whether a text becomes several sequences."""
        return self.kind == "windows"


HEAD = Overflow()
"""The beginning is kept, as a call of the tokenizer has it."""


def pieces(length: int, room: int, choice: Overflow) -> list[Places]:
    """The places of a text's tokens that are kept: one array, or one a window.

    Args:
        length: tokens of the text. room: tokens that there is room for, special ones not counted; at least 1.

    Raises:
        DataError: windows overlap by all of a window, so that none comes any further.
    """
    if length <= room:
        return [np.arange(length)]
    match choice.kind:
        case "tail":
            return [np.arange(length - room, length)]
        case "head+tail":
            first = min(max(round(choice.head * room), 1), room - 1)
            return [np.concatenate([np.arange(first), np.arange(length - (room - first), length)])]
        case "windows":
            overlap = overlapping(room, choice)
            # the last one ends with the text, and has at least one token that no other has
            count = math.ceil((length - overlap) / (room - overlap))
            starts = (room - overlap) * np.arange(min(count, choice.max_windows or count))
            return [np.arange(start, min(start + room, length)) for start in starts.tolist()]
    return [np.arange(room)]


def pieces_of_pair(first: int, second: int, room: int, choice: Overflow) -> list[tuple[Places, Places]]:
    """As ``pieces``, of two texts that share the room.

    The longer one is cut until both are equally long, then both: transformers' ``longest_first``. What of each is kept
    is as it is of a single text. Of windows, the longer text has them, and the other is in each: whole, or its
    beginning where it would take more than half of the room.
    """
    if first + second <= room:
        return [(np.arange(first), np.arange(second))]
    shorter, longer = sorted((first, second))
    kept = min(shorter, room // 2)
    other = np.arange(kept) if choice.has_windows else pieces(shorter, kept, choice)[0]
    each = pieces(longer, room - kept, choice)
    return [(one, other) if first > second else (other, one) for one in each]


def overlapping(room: int, choice: Overflow) -> int:
    """Tokens that two neighbouring windows share.

    Raises:
        DataError: they share all.
    """
    overlap = round(choice.stride * room) if choice.stride < 1 else int(choice.stride)
    if overlap >= room:
        raise DataError(
            f"data.stride = {choice.stride:g}: no window would come further than the one before it",
            why=f"a window has {room} tokens of a text",
            fix="--set data.stride=0.25, a share, or fewer tokens",
        )
    return overlap
