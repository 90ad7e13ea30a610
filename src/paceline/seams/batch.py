"""A micro-batch on the device, and how much work it is.

Shapes: S samples of a micro-batch, W windows where samples have several, L padded length, T positions of a packed
row, P sequences in it, C classes or channels, H height, W width of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree

Ids = NDArray[np.int64]
"""Sample ids: positions in the dataset."""


@dataclass(frozen=True)
class Packed:
    """Where the sequences of a packed row are. Only ``max_length`` is known on the host; the rest is data."""

    cu_seqlens: Tensor
    """int32 [P + 1]: sequence p is positions ``cu_seqlens[p]:cu_seqlens[p + 1]``. They cover the whole row, filler
    included; sequences of length 0 stand at the end."""
    sequence: Tensor
    """int64 [S]: which sequence each sample is."""
    max_length: int
    """No sequence is longer."""

    @property
    def first(self) -> Tensor:
        """int64 [S]: position of each sample's first token."""
        return self.cu_seqlens.index_select(0, self.sequence).long()


@dataclass(frozen=True)
class Mixed:
    """What else each sample of a micro-batch is, where training images are mixed in pairs."""

    labels: Tensor
    """As those of the batch: of the partners."""
    share: Tensor
    """fp32 scalar: how much of a sample is its own."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device, and a pytree; the engine passes it on without looking inside."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model: input_ids [S, L], attention_mask [S, L], ...; packed, input_ids [1, T],
    position_ids [1, T], ...; or pixel_values [S, C, H, W]."""
    labels: Tensor
    """[S] int64 classes, [S] fp32 targets, or [S, C] fp32 of 0 and 1."""
    weights: Tensor
    """[S] fp32; 0 marks filler. A batch of nothing but filler is legal and contributes nothing."""
    packed: Packed | None = None
    """Set when the samples stand one after the other in one row."""
    windows: Tensor | None = None
    """int64 [W]: which sample each window is of, where a sample may be several sequences. Inputs, and ``packed``, are
    then of windows: W stands there for S."""
    mixed: Mixed | None = None
    """Set when the samples are mixed with others, and so are their losses."""

    @property
    def num_samples(self) -> int:
        """S, filler included."""
        return len(self.weights)


def _optional(batch: Batch) -> dict[str, Any]:
    """What is set of the fields that need not be: None would be a leaf of its own."""
    found = {"packed": batch.packed, "windows": batch.windows, "mixed": batch.mixed}
    return {name: part for name, part in found.items() if part is not None}


_pytree.register_pytree_node(
    Packed,
    lambda packed: ([packed.cu_seqlens, packed.sequence], packed.max_length),
    lambda leaves, longest: Packed(*leaves, max_length=longest),  # type: ignore[misc]
)
_pytree.register_pytree_node(
    Mixed,
    lambda mixed: ([mixed.labels, mixed.share], None),
    lambda leaves, _: Mixed(*leaves),
)
_pytree.register_pytree_node(
    Batch,
    lambda b: ([dict(b.inputs), b.labels, b.weights, _optional(b)], None),
    lambda children, _: Batch(*(found := list(children))[:3], **found[3]),
)


@dataclass(frozen=True)
class Size:
    """How much work a micro-batch is: real tokens, and positions computed with padding."""

    samples: int
    tokens: int
    slots: int
