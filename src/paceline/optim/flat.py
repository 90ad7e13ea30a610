"""Many parameters in one buffer, so that one operation reaches all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Elements, 128 bytes or more: every parameter starts at a multiple of it, as matrix products want their operands."""

Format = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Flat:
    """One tensor a parameter, all of them in a few buffers: weights, gradients, or a state of the optimizer."""

    buffers: tuple[Tensor, ...]
    """1-d, one a number format; what lies between two parameters is 0."""
    groups: tuple[tuple[Tensor, ...], ...]
    """Each group's share: 1-d stretches of the buffers, then in its own shape each parameter that stands apart."""
    views: tuple[Tensor, ...]
    """One a parameter, in the layout's order, with its shape and strides."""


@dataclass(frozen=True)
class _Stretch:
    format: Format
    start: int
    size: int


@final
class FlatLayout:
    """Where each parameter stands in flat buffers: group after group, each number format in a buffer of its own.

    A parameter *stands apart* when it does not fill the memory it is in: others may look at that memory, so its weight
    stays where it is. Its gradient and its states have a place in the buffers all the same, behind all groups.

    Args:
        groups: of trained parameters; each parameter once.
        others: the model's other tensors, which may look at the same memory.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], others: Iterable[Tensor] = ()) -> None:
        self.parameters = tuple(parameter for members in groups for parameter in members)
        self._places: dict[nn.Parameter, tuple[tuple[int, ...], int]] = {}  # strides, and where it begins
        self._sizes: Counter[Format] = Counter()
        alone = _alone(self.parameters, others)
        self._stretches = [self._place_group([p for p in members if p in alone]) for members in groups]
        self._sizes_of_weights = dict(self._sizes)
        self._apart = [[p for p in members if p not in alone] for members in groups]
        for members in self._apart:
            self._place_group(members)

    def allocate(self, least: torch.dtype | None = None) -> Flat:
        """Zeros in this layout, in each parameter's number format; with ``least`` in one that also holds its numbers.

        The buffers stay one for each number format of the parameters.
        """
        buffers = _zeros(self._sizes, least)
        return self._flat(buffers, {p: self._view(p, buffers) for p in self.parameters})

    @torch.no_grad()
    def move_in(self) -> Flat:
        """Move the weights into buffers of this layout, once and for all: the parameters become views of them.

        They stay the objects that they were; only ``parameter.data`` is bound anew. So this comes before anything
        remembers an address, as a captured CUDA graph does.
        """
        buffers = _zeros(self._sizes_of_weights)
        apart = {p for members in self._apart for p in members}
        for parameter in self.parameters:
            if parameter not in apart:
                view = self._view(parameter, buffers)
                parameter.data = view.copy_(parameter)
        return self._flat(buffers, {p: p.data for p in self.parameters})

    def _place_group(self, members: Sequence[nn.Parameter]) -> list[_Stretch]:
        stretches = []
        for kind in dict.fromkeys(_format(p) for p in members):
            start = self._sizes[kind]
            for parameter in members:
                if _format(parameter) == kind:
                    self._places[parameter] = _strides(parameter), self._sizes[kind]
                    self._sizes[kind] += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            stretches.append(_Stretch(kind, start, self._sizes[kind] - start))
        return stretches

    def _view(self, parameter: nn.Parameter, buffers: Mapping[Format, Tensor]) -> Tensor:
        # .data: the same memory, which a compiler that looks at every .grad need not follow back to the buffer
        return buffers[_format(parameter)].as_strided(parameter.shape, *self._places[parameter]).data

    def _flat(self, buffers: Mapping[Format, Tensor], views: Mapping[nn.Parameter, Tensor]) -> Flat:
        groups = tuple(
            (*(buffers[s.format].narrow(0, s.start, s.size) for s in stretches), *(views[p] for p in apart))
            for stretches, apart in zip(self._stretches, self._apart, strict=True)
        )
        return Flat(tuple(buffers.values()), groups, tuple(views[p] for p in self.parameters))


def _format(tensor: Tensor) -> Format:
    return tensor.dtype, tensor.device


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own, so that channels stay last; without the gaps of a tensor that has some."""
    return torch.empty_like(tensor, device="meta").stride()


def _alone(parameters: Sequence[nn.Parameter], others: Iterable[Tensor]) -> set[nn.Parameter]:
    """Those that fill the memory they are in, and nobody else does."""
    users = Counter(_memory(tensor) for tensor in (*parameters, *others))
    return {
        p
        for p in parameters
        if users[_memory(p)] == 1
        and p.untyped_storage().nbytes() == p.numel() * p.element_size()
        and p.stride() == _strides(p)
    }


def _memory(tensor: Tensor) -> int:
    # unlike data_ptr(), this also tells tensors apart that have no memory: on the meta device, or fake ones
    return int(tensor.untyped_storage()._cdata)


def _zeros(sizes: Mapping[Format, int], least: torch.dtype | None = None) -> dict[Format, Tensor]:
    return {
        (dtype, device): torch.zeros(size, dtype=torch.promote_types(dtype, least or dtype), device=device)
        for (dtype, device), size in sizes.items()
    }
