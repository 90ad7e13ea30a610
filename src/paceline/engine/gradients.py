"""Who holds and sums gradients."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from paceline.errors import UserError


class Gradients(ABC):
    """The gradients of one model; always sums, over micro-batches and ranks alike."""

    @abstractmethod
    def backward(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Wraps the backward pass of a micro-batch; ``last``: of the step, so ranks may sum now."""

    @abstractmethod
    def norm(self) -> Tensor:
        """Global 2-norm, one fp32 device scalar.

        Raises:
            UserError: someone took a gradient away.
        """

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a device scalar."""

    @abstractmethod
    def zero(self) -> None:
        """Forget the step's gradients."""


@final
class FlatGradients(Gradients):
    """One flat buffer a number format; every parameter's ``.grad`` is a view into it and is never rebound.

    Args:
        parameters: those that are trained, in a fixed order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buffers: list[Tensor] = []
        self._views: list[Tensor] = []
        self._parameters: list[nn.Parameter] = []
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            members = [p for p in parameters if p.dtype == dtype]
            buffer = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
            pieces = buffer.split([p.numel() for p in members])
            for parameter, piece in zip(members, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape)
                self._views.append(parameter.grad)
                self._parameters.append(parameter)
            self._buffers.append(buffer)

    @contextlib.contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        yield

    def norm(self) -> Tensor:
        if any(p.grad is not view for p, view in zip(self._parameters, self._views, strict=True)):
            raise UserError(
                "a parameter's .grad is no longer the engine's",
                "zero_grad() or an assignment took it away, so clipping and loss scaling would not see it",
                "remove the call: update() forgets the gradients by itself",
            )
        # a norm of norms, as torch.nn.utils.clip_grad_norm_ takes it, so that clipping gives its bits
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(self._views)])
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def scale(self, factor: Tensor) -> None:
        for buffer in self._buffers:
            buffer.mul_(factor)

    def zero(self) -> None:
        for buffer in self._buffers:
            buffer.zero_()
