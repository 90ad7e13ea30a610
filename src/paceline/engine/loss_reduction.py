"""Recognise a loss that is a mean where a sum is needed, by its autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_TRANSPARENT = frozenset({"AliasBackward0", "CloneBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0"})
_MEAN, _SUM = 1, 2
"""What torch's losses save as their ``reduction``."""


def is_mean(loss: Tensor, denominator: float) -> bool:
    """Whether a scalar loss is a mean of its samples' losses, or their sum divided by ``denominator``.

    A mean that is multiplied by a number above 1, such as its count, is none. Where the graph does not tell, as that of
    a compiled model, the answer is False.
    """
    means, sums = list[float](), list[float]()
    is_known = loss.grad_fn is not None
    for kind, scale in _terms(loss.grad_fn, 1.0) if is_known else ():
        is_known = is_known and kind != "unknown"
        (means if kind == "mean" else sums).append(abs(scale))
    if not is_known or any(scale > 1 for scale in means):
        return False
    if means:  # a sum beside a mean is a penalty, or a term of smoothed labels that torch divides itself
        return all(scale * denominator <= 1 for scale in sums)
    return all(math.isclose(scale * denominator, 1, rel_tol=1e-3) for scale in sums)


def _terms(node: Any, scale: float) -> Iterator[tuple[str, float]]:
    """Kind (``mean``, ``sum``, ``unknown``) and factor of every term that a loss is the sum of."""
    name = node.name()
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    factor = _number(getattr(node, "_saved_other", None))
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith(("AddBackward", "SubBackward")) or name in _TRANSPARENT:
        for parent in parents:
            yield from _terms(parent, scale)
    elif name.startswith(("MulBackward", "DivBackward")) and factor and len(parents) == 1:
        yield from _terms(parents[0], scale * factor if name.startswith("Mul") else scale / factor)
    elif name.startswith("MeanBackward") or reduction == _MEAN:
        yield "mean", scale
    elif name.startswith("SumBackward") or reduction == _SUM:
        yield "sum", scale
    else:
        yield "unknown", scale


def _number(value: object) -> float | None:
    """A factor that is the same for all samples; None for a tensor of several."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
