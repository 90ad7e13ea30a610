"""How far two computations of the same are apart, and whether that is rounding.

As in ``compare``: what is near enough in fp32 is equal; what is not is computed once more in fp64, where rounding is
2^29 times smaller and a fault stays as large as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.check.claim import Broken
from paceline.compare import apart

NEAR = 1e-4
"""Differences in fp32, in units of the norm, that need no closer look."""

EXACT = 1e-6
"""What may be left of a difference in fp64; losses are computed in fp32 also then."""

ROUGH = 0.1
"""In fp32, above this nobody looks again."""

FLOOR = 1e-3
"""A tensor's difference is measured by its own norm, or by this share of the norm of all of its kind: what is nearly
nothing beside the others may be nothing but rounding."""

FLOORS = {"change": 0.1, "state": 0.1}
"""First word of a kind -> its own share; a weight's change is rounded as the weight is, however small the change, and a
moment of what is nearly nothing is that of its rounding."""

NOISE = 0.05
"""What the order in which a GPU adds may make of a state after some steps in bf16; what was forgotten or drawn anew
makes a half and more of it."""

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
        floor = whole * (FLOORS.get(kind.partition(" ")[0], FLOOR) if floors else 1.0)
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


def within(expected: Measured, found: Measured, tolerance: float, ways: str) -> float:
    """The largest difference of all.

    Raises:
        Broken: one is larger than ``tolerance``.
    """
    seen = difference(expected, found, tolerance)
    if seen is not None:
        raise different(seen, ways)
    return furthest(expected, found)


def copied(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Copies on the CPU of what an engine's state holds: ``kind: name`` -> tensor."""
    return {f"{kind}: {name}": t.detach().cpu().clone() for kind in tensors for name, t in tensors[kind].items()}


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


def same_state(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], ways: str, *, noise: float = 0.0) -> None:
    """Compare two states: bit for bit, or every tensor up to what the order in which a GPU adds makes of it.

    Args:
        expected, found: ``kind: name`` -> tensor.
        noise: share of its norm that a tensor of floats may be away, see ``FLOORS``; 0: it has the same bits.

    Raises:
        Broken: they differ.
    """
    more = next((name for name in found if name not in expected), None)
    if more is not None:
        raise Broken(f"{ways}: {more} was not there before", tensor=more)
    inexact = {name for name, tensor in expected.items() if noise and tensor.is_floating_point()}
    same_bits({name: tensor for name, tensor in expected.items() if name not in inexact}, found, ways)
    seen = difference(_by_kind(expected, inexact), _by_kind(found, inexact), noise)
    if seen is not None:
        raise Broken(
            f"{ways}: {seen.tensor} differs by {seen.away:.1e} of its norm", tensor=seen.tensor, away=seen.away
        )


def _by_kind(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """``optimizer: a.weight.exp_avg`` is of the kind ``optimizer exp_avg``: a moment is not measured by another's."""
    found: dict[str, dict[str, Tensor]] = {}
    for label, tensor in tensors.items():
        if label in names:
            kind, _, name = label.rpartition(": ")
            kind = f"{kind} {name.rpartition('.')[2]}" if kind == "optimizer" else kind
            found.setdefault(f"state ({kind})", {})[name] = tensor
    return found


def _both_nan(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())


def _distance(expected: Tensor, found: Tensor, norm: float) -> float:
    return apart(expected.double(), found.double().to(expected.device), norm)
