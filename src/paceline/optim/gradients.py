"""Who holds and sums gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from paceline.contract.errors import UserError
from paceline.optim.flat import Flat, FlatLayout
from paceline.seams import World

Put = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]
"""Writes or adds gradients to the views that stand for them; None: there is none."""


class AllReduce(ABC):
    """The all-reduce of a step's flat gradients, beside its last backward pass."""

    @abstractmethod
    def backward(self, loss: Tensor, put: Put) -> None:
        """Differentiate a step's last micro-batch, and begin to sum. Nothing is begun while a graph is captured."""

    @abstractmethod
    def finish(self) -> None:
        """Begin what has not begun, and have the device wait for all of it; never captured."""

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """Whether ``backward`` or ``finish`` has been entered and the step's all-reduce is not finished."""


MakeAllReduce = Callable[[Sequence[nn.Parameter], Flat], AllReduce]
"""Parameters and their flat gradients -> their all-reduce."""


@dataclass(frozen=True)
class Shards:
    """Parameters of which every rank of a world keeps another shard; the others are the same on all of them."""

    parameters: Collection[nn.Parameter]
    world: World


class Gradients(ABC):
    """The gradients of one model; always sums, over micro-batches and ranks alike."""

    ranks_meet = False
    """Whether ranks meet within ``add`` and ``norm``, captured passes included: they then capture, and replay, the same
    passes together."""

    @abstractmethod
    def add(self, loss: Tensor, *, first: bool, last: bool) -> None:
        """Differentiate a micro-batch's loss and add its gradients to those of the step.

        Args:
            loss: scalar, loss scale included.
            first: of the step: what was there before is overwritten.
            last: of the step, so that ranks may all-reduce now.
        """

    @property
    def all_reduce_under_way(self) -> bool:
        """Whether the step's all-reduce has begun and is not finished."""
        return False

    def finish(self) -> None:  # noqa: B027 - alone, there is nothing to finish
        """Finish the all-reduce that the last ``add`` began. Called once a step, before anything reads the
        gradients, and never captured; waits on the device, not on the host."""

    @abstractmethod
    def check(self) -> None:
        """Make sure, on the host alone, that the gradients are still where the engine put them.

        Raises:
            UserError: someone took a gradient away.
        """

    @abstractmethod
    def norm(self) -> Tensor:
        """Global 2-norm, one fp32 device scalar."""

    def zero_share(self, without: Collection[nn.Parameter] = ()) -> Tensor | None:
        """Share of all gradients that are exactly 0, one fp32 device scalar; None where nobody counts.

        Args:
            without: parameters whose gradients do not count.
        """
        return None

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a device scalar."""

    @abstractmethod
    def zero(self) -> None:
        """Forget the step's gradients."""


@final
class FlatGradients(Gradients):
    """One flat buffer a number format; every parameter's ``.grad`` is a view into it and is never rebound.

    A step's first micro-batch overwrites them, so nothing is zeroed between steps. Autograd hands its gradients over
    all at once and they are copied in one go, for adding each where it arises costs one launch a parameter. Only with
    several ranks, in a step's last micro-batch, they are taken bucket by bucket, so that the all-reduce goes on beside
    the rest of the backward pass. A parameter without a gradient on one rank counts as zeros there.

    Args:
        parameters: those that are trained, in a fixed order.
        layout: of these parameters, to share one with others; None: one of its own.
        all_reduce: makes the all-reduce; None: there is one rank.
        shards: which of the parameters are shards; None: each is whole.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout | None = None,
        all_reduce: MakeAllReduce | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._parameters, self._shards = tuple(parameters), shards
        self.flat: Flat = (layout or FlatLayout([self._parameters])).allocate()
        for parameter, view in zip(self._parameters, self.flat.views, strict=True):
            parameter.grad = view
        self._all_reduce = None if all_reduce is None else all_reduce(self._parameters, self.flat)

    def add(self, loss: Tensor, *, first: bool, last: bool) -> None:
        if last and self._all_reduce is not None:
            self._all_reduce.backward(loss, partial(_put, first=first))
        else:
            _put(self.flat.views, torch.autograd.grad(loss, self._parameters, allow_unused=True), first=first)

    @property
    def all_reduce_under_way(self) -> bool:
        return self._all_reduce is not None and self._all_reduce.under_way

    def finish(self) -> None:
        if self._all_reduce is not None:
            self._all_reduce.finish()

    def check(self) -> None:
        # every step pays for this: no loop in Python
        if not all(map(is_, map(attrgetter("grad"), self._parameters), self.flat.views)):
            raise UserError(
                "a parameter's .grad is no longer the engine's",
                "zero_grad() or an assignment took it away, so clipping and loss scaling would not see it",
                "remove the call: update() forgets the gradients by itself",
            )

    def norm(self) -> Tensor:
        if self._shards is not None:
            return self._norm_over(self._shards)
        if any(buffer.device.type != "cpu" for buffer in self.flat.buffers):
            return norm_of_buffers(self.flat.buffers)
        # a norm of norms, as torch.nn.utils.clip_grad_norm_ takes it, so that clipping gives its bits
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(self.flat.views)])
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def _norm_over(self, shards: Shards) -> Tensor:
        """The squares of shards are summed over ranks, those of whole gradients counted once; in fp64, for squares of
        small fp32 numbers may vanish."""
        squares = torch.stack([norm.double() for norm in torch._foreach_norm(self.flat.views)]).square()
        cut = [parameter in shards.parameters for parameter in self._parameters]
        one = torch.tensor(cut, device=squares.device)
        summed = shards.world.all_reduce(squares.where(one, 0.0).sum())
        return (squares.where(~one, 0.0).sum() + summed).sqrt().float()

    def zero_share(self, without: Collection[nn.Parameter] = ()) -> Tensor | None:
        # the whole buffers, in which what lies between two parameters is 0, and the few that do not count taken out
        left_out = set(without)
        pairs = list(zip(self._parameters, self.flat.views, strict=True))
        numbers = sum(parameter.numel() for parameter, _ in pairs if parameter not in left_out)
        if not numbers:
            return None
        counts = [  # in fp32 at least, in which 256 and one more are not the same
            torch.linalg.vector_norm(buffer, 0, dtype=torch.promote_types(buffer.dtype, torch.float32)).float()
            for buffer in self.flat.buffers
        ]
        counts += [-torch.linalg.vector_norm(v, 0, dtype=torch.float32) for p, v in pairs if p in left_out]
        return 1 - torch.stack(counts).sum() / numbers

    def scale(self, factor: Tensor) -> None:
        for buffer in self.flat.buffers:
            buffer.mul_(factor)

    def zero(self) -> None:
        for buffer in self.flat.buffers:
            buffer.zero_()


def _put(views: Sequence[Tensor], gradients: Sequence[Tensor | None], *, first: bool) -> None:
    """Write gradients to their views if they are the step's ``first``, else add them."""
    alike: list[tuple[Tensor, Tensor]] = []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            if first:
                view.zero_()
        elif gradient.layout is torch.strided and gradient.stride() == view.stride():
            alike.append((view, gradient))
        elif first:
            view.copy_(gradient.to_dense())
        else:
            view.add_(gradient)
    if alike:  # other strides in one of the lists would send all of it down a slow path
        to, found = zip(*alike, strict=True)
        (torch._foreach_copy_ if first else torch._foreach_add_)(to, found)


def norm_of_buffers(buffers: Sequence[Tensor]) -> Tensor:
    """2-norm of all elements of 1-d tensors, one fp32 scalar: one pass over each, summed in fp32 or wider."""
    norms = [torch.linalg.vector_norm(b, dtype=torch.promote_types(b.dtype, torch.float32)).float() for b in buffers]
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total
