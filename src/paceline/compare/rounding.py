"""Whether two results of a model are equal up to rounding.

How far rounding takes equal results apart is a matter of the model: of how much it adds up, and above all of how much
it magnifies, as attention with large weights does. So no number tells rounding from a fault; but in fp64 rounding is
2^29 times smaller, and a fault stays as large as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.machine.device import PLANNED

TOLERANCES = {("cpu", torch.float64): 1e-10, ("cpu", torch.float32): 1e-5}
"""Difference up to which results are equal without a closer look, relative to their norm; 1e-4 on GPUs, whose sums
come in any order."""

ROUGH, EXACT = 0.1, 1e-7
"""Relative to their norm: difference in fp32 that is looked at again in fp64, and what may be left of it there. The
loss is computed in fp32 also then, whose rounding is 6e-8."""


class Results(NamedTuple):
    """What a model computes of a batch, in fp32 or fp64."""

    logits: Tensor
    """[S, ...]"""
    gradients: Mapping[str, Tensor]
    """Gradients of the summed loss, by parameter name; empty where nothing is trained."""


def beyond_rounding(
    name: str,
    expected: Results,
    found: Results,
    in_fp64: Callable[[], tuple[Results, Results]],
    *,
    ways: tuple[str, str],
    anywhere: Callable[[bool], bool] = bool,
) -> str | None:
    """Where two results of the model ``name`` differ, of which the first is right; None where they are equal.

    On a device that is only planned with they are equal: tensors that hold nothing say nothing. Their differences are
    made nevertheless, for what they take counts.

    Args:
        in_fp64: expected and found once more, in fp64; called where fp32 cannot tell.
        ways: adjectives for what was found and for what was expected.
        anywhere: whether a flag is set on any rank, where ranks compute together: all then look closer, or none.
    """
    logits = expected.logits
    if logits.device.type == PLANNED:
        for key, slope in expected.gradients.items():
            slope.sub(found.gradients[key])
        return None
    reason = beyond(name, expected, found, tolerance_of(logits.device, logits.dtype), ways)
    if not anywhere(reason is not None) or logits.dtype == torch.float64:
        return reason
    if anywhere(beyond(name, expected, found, ROUGH, ways) is not None):
        return reason
    try:
        return beyond(name, *in_fp64(), EXACT, ways)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model that does not compute in fp64 is judged by what it does compute
        return reason


def tolerance_of(device: torch.device, dtype: torch.dtype) -> float:
    """Difference up to which results are equal without a closer look, relative to their norm."""
    return TOLERANCES.get((device.type, dtype), 1e-4)


def beyond(name: str, expected: Results, found: Results, tolerance: float, ways: tuple[str, str]) -> str | None:
    """Where results differ by more than ``tolerance`` of their norm."""
    (logits, slopes), (found_logits, found_slopes), (this, that) = expected, found, ways
    if logits.shape != found_logits.shape:
        return f"{name}: {this} logits have the shape {tuple(found_logits.shape)}, {that} ones {tuple(logits.shape)}"
    away = apart(logits, found_logits, _norm([logits]))
    if away > tolerance:
        return f"{name}: {this} logits differ from {that} ones by {away:.1e} of their norm"
    if slopes.keys() != found_slopes.keys():
        return f"{name}: no gradient reaches the parameters from {this} logits"
    norm = _norm(slopes.values())
    differ = {key: apart(slopes[key], found_slopes[key], norm) for key in slopes}
    worst = max(differ, key=differ.__getitem__, default=None)
    if worst is not None and differ[worst] > tolerance:
        return f"{name}: {this} and {that} gradients of {worst} differ by {differ[worst]:.1e} of the gradient's norm"
    return None


def apart(expected: Tensor, found: Tensor, norm: float) -> float:
    """Norm of the difference in units of ``norm``; infinite where something is not a number."""
    distance = (expected - found).norm().item()
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) else math.inf


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [tensor.norm() for tensor in tensors]
    return float(torch.stack(norms).norm()) if norms else 0.0
