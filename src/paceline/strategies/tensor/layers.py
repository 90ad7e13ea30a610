"""The two kinds of linear layers that a block is cut into, and what ranks exchange at either end.

A pair begins with layers of which each rank keeps some outputs (its attention heads, its columns of the MLP), and ends
with one of which each rank keeps the inputs that belong to them. At its beginning ranks have the same input, and the
gradient that comes back is summed; at its end outputs are summed, and the gradient that comes back is the same. So
everything outside of pairs is computed alike on all ranks, to the bit.

Weights and gradients are plain tensors: what a rank keeps of a weight is a parameter like any other.

Shapes: ... any leading dimensions, I inputs, O outputs, of which this rank keeps i or o.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053: f is ``_Enter``, g is ``_Leave``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.rng import generators
from paceline.machine.device import PLANNED
from paceline.seams import World
from paceline.strategies.tensor.shard import Cut


@final
class _Enter(torch.autograd.Function):
    """Forward the identity, backward the all-reduce."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # a copy: others may read what autograd hands over
        return ctx.world.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


@final
class _Leave(torch.autograd.Function):
    """Forward the all-reduce, in place; backward the identity."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, world: World) -> Tensor:
        ctx.mark_dirty(partial)
        return world.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@final
class Inside:
    """What lies between the two ends of one pair.

    In training, ranks draw different random numbers there, for each has other heads. The seed of each is drawn from
    the numbers that all ranks have in common, and behind it all go on with these. So recomputation, which begins with
    the same numbers, finds the same masks.

    Args:
        world: the ranks along the tensor axis.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._entered: list[tuple[Tensor, Tensor]] = []
        self._before: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> Inside:
        return Inside(self.world)  # a process group has no copy

    def forget(self) -> None:
        """Begin a new pass, whatever became of the last one."""
        self._entered.clear()
        self._before.clear()

    def enter(self, hidden: Tensor, *, training: bool) -> Tensor:
        """[..., I] -> the same. Layers that are given one tensor share its gradient's sum."""
        for given, entered in self._entered:
            if given is hidden:
                return entered
        if training and not self._before and hidden.device.type != PLANNED:
            self._draw_apart(hidden.device)
        entered = _Enter.apply(hidden, self.world)  # type: ignore[no-untyped-call]
        self._entered.append((hidden, entered))
        return entered  # type: ignore[no-any-return]

    def leave(self, partial: Tensor) -> Tensor:
        """[..., O], this rank's part of a sum -> the sum."""
        for generator, state in zip(generators(partial.device), self._before, strict=False):
            generator.set_state(state)
        self.forget()
        return _Leave.apply(partial, self.world)  # type: ignore[no-untyped-call,no-any-return]

    def _draw_apart(self, device: torch.device) -> None:
        # of the host, where nothing has to be waited for; up to 2^16 ranks have seeds of their own
        seed = int(torch.randint(2**46, (), device="cpu")) * 2**16 + self.world.rank
        for generator in generators(device):
            self._before.append(generator.get_state())
            generator.manual_seed(seed)


class _CutLinear(nn.Module):
    """A linear layer of which this rank keeps a piece.

    Args:
        inside: where the ranks meet, and draw their own random numbers.
        cuts: how weight and bias were cut, by name.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, inside: Inside, cuts: Mapping[str, Cut]
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.cuts = weight, bias, cuts
        self._inside = inside


@final
class ColumnLinear(_CutLinear):
    """Keeps some outputs: weight [o, I], bias [o]. A pair begins with it."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., I] -> [..., o]."""
        return F.linear(self._inside.enter(hidden, training=self.training), self.weight, self.bias)


@final
class RowLinear(_CutLinear):
    """Keeps some inputs: weight [O, i]; the bias [O] is whole on every rank, and added once. A pair ends with it."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., i] -> [..., O]."""
        out = self._inside.leave(F.linear(hidden, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)
