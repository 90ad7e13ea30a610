"""How far two computations of the same are apart, and whether that is rounding.

As in ``compare``: what is near enough in fp32 is equal; what is not is computed once more in fp64, where rounding is
2^29 times smaller and a fault stays as large as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.check.claim import Broken

NEAR = 1e-4
"""Differences in fp32, in units of the norm, that need no closer look."""

EXACT = 1e-6
"""What may be left of a difference in fp64; losses are computed in fp32 also then."""

ROUGH = 0.1
"""In fp32, above this nobody looks again."""

FLOOR = 1e-3
"""A tensor's difference is measured by its own norm, or by this share of the norm of all of its kind: what is nearly
nothing beside the others may be nothing but rounding."""

FLOORS = {"change": 0.1}
"""Kind -> its own share; a weight's change is rounded as the weight is, however small the change."""

Measured = Mapping[str, Mapping[str, Tensor]]
"""Kind of tensor (``gradient``) -> name (``classifier.weight``) -> tensor. Norms are taken over all of a kind."""

Computed = tuple[Measured, Measured]
"""What is expected, and what was found."""


class Difference(NamedTuple):
    """The first tensor that differs."""

    tensor: str
    away: float
    """In units of its norm, see ``FLOOR``."""
    worst: str
    furthest: float


def difference(expected: Measured, found: Measured, tolerance: float, *, floors: bool = True) -> Difference | None:
    """The first tensor, in the order of ``expected``, that is further away than ``tolerance``; None: there is none.

    Args:
        floors: False: each tensor is measured by the norm of all of its kind, however small it is itself.

    Raises:
        Broken: one of the two lacks a tensor, or has another shape of it.
    """
    apart: dict[str, float] = {}
    for kind, tensors in expected.items():
        norms = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
        whole = math.hypot(*norms.values())
        floor = whole * (FLOORS.get(kind, FLOOR) if floors else 1.0)
        for name, tensor in tensors.items():
            label = f"{kind} of {name}" if name else kind
            other = found.get(kind, {}).get(name)
            if other is None or other.shape != tensor.shape:
                there = "is not there" if other is None else f"has the shape {tuple(other.shape)}"
                raise Broken(f"the {label} {there}", tensor=label)
            apart[label] = _distance(tensor, other, max(norms[name], floor))
    first = next((label for label, away in apart.items() if not away <= tolerance), None)
    if first is None:
        return None
    worst = max(apart, key=lambda label: apart[label])
    return Difference(first, apart[first], worst, apart[worst])


def furthest(expected: Measured, found: Measured) -> float:
    """The largest difference of all."""
    seen = difference(expected, found, -1.0)
    return seen.furthest if seen else 0.0


def same_up_to_rounding(compute: Callable[[bool], Computed], ways: str) -> float:
    """Compute in fp32, and once more in fp64 where that cannot tell; the largest difference that was accepted.

    Args:
        compute: whether in fp64 -> what is expected, and what was found.
        ways: what is compared with what, as ``packed and padded``.

    Raises:
        Broken: they differ.
    """
    expected, found = compute(False)
    seen = difference(expected, found, NEAR)
    if seen is None:
        return furthest(expected, found)
    beyond = difference(expected, found, NEAR, floors=False)
    if beyond is None or beyond.furthest <= ROUGH:
        try:
            exact = compute(True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that does not compute in fp64 is judged by what it does compute
            if beyond is None:
                return furthest(expected, found)
            raise different(beyond, ways) from error
        seen = difference(*exact, EXACT)
        if seen is None:
            return furthest(*exact)
    raise different(seen, ways)


def different(seen: Difference, ways: str) -> Broken:
    """What is told of a difference."""
    more = "" if seen.worst == seen.tensor else f"; most of all in the {seen.worst}, by {seen.furthest:.1e}"
    told = f"{ways} differ in the {seen.tensor}, by {seen.away:.1e} of its norm{more}"
    return Broken(told, tensor=seen.tensor, away=seen.away)


def same_bits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], ways: str) -> None:
    """Compare two states bit for bit.

    Raises:
        Broken: they differ.
    """
    for name, tensor in expected.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            raise Broken(f"{ways}: {name} is not there as it was", tensor=name)
        if not torch.equal(tensor, other) and not _both_nan(tensor, other):
            away = _distance(tensor, other, float(tensor.double().norm()))
            raise Broken(f"{ways}: {name} differs by {away:.1e} of its norm", tensor=name, away=away)


def _both_nan(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())


def _distance(expected: Tensor, found: Tensor, norm: float) -> float:
    distance = float((expected.double() - found.double().to(expected.device)).norm())
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) else math.inf
