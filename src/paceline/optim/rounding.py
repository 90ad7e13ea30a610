"""How a weight in bf16 takes an update that is smaller than its last bit: by chance, or by a second number beside it.

The update is worked out in fp32 and then written to the weight. Rounded to *nearest*, one of less than 1/512 of the
weight is lost each time. Rounded *stochastically* it takes hold with the probability of its size, so that the mean is
right. By *Kahan* summation what rounding took is kept in a buffer of the weight's format, and added at the next update.

Source: Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192; the compensation is the exact sum's remainder in
fp32, which is Kahan's where the sum is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

COMPENSATION = "compensation"
"""Name of Kahan's buffer among the states of an optimizer."""

PIECE = 2**22
"""Elements that are worked on in fp32 at a time: what that takes of memory does not grow with the model."""

_GOLDEN, _FIRST, _SECOND = -0x61C88647, 0x7FEB352D, -0x7B935975
"""Constants of the hash, as signed 32-bit numbers: of the golden ratio, and of Wellons' lowbias32."""


def kahan_(weight: Tensor, compensation: Tensor, exact: Tensor) -> None:
    """Write ``exact`` to ``weight``, and to ``compensation`` what rounding takes of it.

    Args:
        weight, compensation: bf16. The weight's whole value is their sum, which the next update begins with.
        exact: fp32, of the same shape.

    Example:
        >>> exact = weight.float() + compensation.float() - lr * gradient.float()
        >>> kahan_(weight, compensation, exact)
    """
    weight.copy_(exact)
    compensation.copy_(exact - weight.float())


def stochastic_(weight: Tensor, exact: Tensor, noise: Tensor) -> None:
    """Write ``exact`` to ``weight``, rounded up with the probability of how near it is to the larger neighbour.

    Args:
        weight: bf16.
        exact: fp32, of the same shape.
        noise: int32 from 0 up to 2**16, of the same shape; see ``noise_of``.
    """
    # bf16 is the first half of fp32's bits: noise on the second half carries over as often as that half is large
    weight.copy_((exact.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32))


def noise_of(shape: torch.Size, step: Tensor, place: int, device: torch.device) -> Tensor:
    """Numbers from 0 up to 2**16 that look random, int32, in ``shape``; the same for the same step and place.

    A hash rather than a generator: all ranks have the same, a captured graph has others at each step, and a resumed run
    has those that it would have had.

    Args:
        step: scalar on ``device``.
        place: where in the weights the numbers begin.
    """
    key = _hashed(step.to(torch.int32) * _GOLDEN + (place * 2654435761 + 1) % 2**31)
    count = torch.arange(shape.numel(), dtype=torch.int32, device=device)
    return _hashed(count ^ key).bitwise_and_(0xFFFF).view(shape)


def update_in_fp32(
    tensors: Sequence[list[Tensor]],
    update: Callable[[Sequence[list[Tensor]]], None],
    *,
    rounding: str,
    step: Tensor,
    skipped: Tensor,
) -> None:
    """Carry out an update of weights in bf16 in fp32, piece by piece, and round as it is asked for.

    Args:
        tensors: weights, gradients and states, each a list of the same shapes; with ``kahan`` the last is the
            compensation.
        update: changes weights and states in place; it is given all but the compensation, in fp32.
        rounding: ``stochastic`` or ``kahan``.
        step: scalar on the device: which update this is.
        skipped: bool scalar on the device; true: nothing is changed at all.
    """
    place = 0
    for row in zip(*tensors, strict=True):
        for piece in _pieces(row):
            weight, gradient, *states = piece
            compensation = states.pop() if rounding == "kahan" else None
            exact = weight.float() if compensation is None else weight.float() + compensation.float()
            wide = [exact, gradient.float(), *(state.float() for state in states)]
            update([[tensor] for tensor in wide])
            if compensation is None:
                # where nothing was updated nothing is between two neighbours
                stochastic_(weight, exact, noise_of(weight.shape, step, place, weight.device))
            else:
                before = weight.clone(), compensation.clone()
                kahan_(weight, compensation, exact)
                # the sum of both may not have fitted fp32
                weight.copy_(torch.where(skipped, before[0], weight))
                compensation.copy_(torch.where(skipped, before[1], compensation))
            for state, value in zip(states, wide[2:], strict=True):
                state.copy_(value)
            place += weight.numel()


def _pieces(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """A stretch of a flat buffer in pieces; a parameter that stands apart, with a shape of its own, in one."""
    if row[0].ndim != 1:
        return iter([row])
    return zip(*(tensor.split(PIECE) for tensor in row), strict=True)


def _hashed(value: Tensor) -> Tensor:
    """Wellons' lowbias32 over int32, whose products wrap around and whose shifts take the sign along."""
    value = (value ^ (value >> 16 & 0xFFFF)) * _FIRST
    value = (value ^ (value >> 15 & 0x1FFFF)) * _SECOND
    return value ^ (value >> 16 & 0xFFFF)
