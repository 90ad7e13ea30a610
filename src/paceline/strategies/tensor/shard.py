"""What one rank keeps of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut: along ``dim``, which is ``parts`` stretches of one length; a rank has a piece of each."""

    dim: int
    parts: int
    rank: int
    size: int

    def shard(self, whole: Tensor) -> Tensor:
        """What this rank keeps of a whole tensor, in memory of its own."""
        return self._stretches(whole).flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, shard: Tensor) -> None:
        """Write a rank's shard to its place in a whole tensor."""
        place = self._stretches(whole)
        place.copy_(shard.view(place.shape))

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """The shape of the tensor of which ``shape`` is a shard's."""
        return torch.Size(n * self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def _stretches(self, whole: Tensor) -> Tensor:
        """View of this rank's shard, with ``dim`` as two: the stretches, and what it has of each."""
        apart: Tensor = whole.unflatten(self.dim, (self.parts, -1))
        length = apart.shape[self.dim + 1] // self.size
        return apart.narrow(self.dim + 1, self.rank * length, length)
