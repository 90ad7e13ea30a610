"""What has to be equal on all ranks, compared before it can do harm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.contract.errors import UserError
from paceline.distributed.exchange import check_places
from paceline.machine.cluster import named
from paceline.seams import World

MOST_SHOWN = 8
"""Differing keys that a message names."""


def agree(world: World, what: str, value: Any, fix: str = "") -> None:
    """Make sure that ``value`` is the same on all ranks; a collective.

    Args:
        what: it is, for the message: ``the recipe``.
        value: what JSON holds; of mappings the differing keys are named.
        fix: what a person does about a difference.

    Raises:
        UserError: on every rank, naming the ranks and what they have.
        RuntimeError: ranks are at different places of the program.
    """
    found = world.gather([what, value])
    check_places([place for place, _ in found])
    ranks = [_leaves(each) for _, each in found]
    keys = dict.fromkeys(key for leaves in ranks for key in leaves)
    differing = [key for key in keys if len({leaves.get(key) for leaves in ranks}) > 1]
    if not differing:
        return
    shown = [_difference(key, [leaves.get(key, "absent") for leaves in ranks]) for key in differing[:MOST_SHOWN]]
    if len(differing) > MOST_SHOWN:
        shown.append(f"and {len(differing) - MOST_SHOWN} more")
    raise UserError(
        f"{what}: not the same on all ranks",
        "; ".join(shown),
        fix or f"give every rank the same {what.removeprefix('the ')}",
    )


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> JSON of every value that is no mapping, or an empty one; the path of the whole is empty."""
    if isinstance(value, Mapping) and value:
        return {
            inner: text
            for key, each in value.items()
            for inner, text in _leaves(each, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: json.dumps(value)}


def _difference(key: str, values: list[str]) -> str:
    """``optimizer.lr is 1e-05 on ranks 0, 1 and 3e-05 on rank 2``."""
    parts = [
        f"{value} on {named([rank for rank, other in enumerate(values) if other == value])}"
        for value in dict.fromkeys(values)
    ]
    return f"{key or 'it'} is {' and '.join(parts)}"
