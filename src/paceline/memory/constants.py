"""What a card and its libraries take beside torch's tensors: measured once a kind of card, and kept in a small file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from paceline.facts import Card

MEASURED: Final = "NVIDIA H200"
"""Whose constants stand for those of later cards too."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one kind of card under one build of torch. Sizes in bytes."""

    source: str
    """Where they come from, for people."""
    context: int
    """Of the card's memory, what is gone before torch's allocator reserves anything: the driver's context, and the code
    of the kernels that a step loads."""
    communicator: int
    """Taken by NCCL beside it, where ranks exchange anything."""
    workspaces: tuple[int, ...]
    """Kept by matrix products from the first on, from the allocator's pool that they compute in: cuBLAS's, one for each
    thread, that of the forward and that of the backward pass."""


def constants_for(card: Card) -> Constants:
    """Those measured on this kind of card; else those of its generation, which ``source`` then says."""
    known = json.loads((files("paceline.memory") / "constants.json").read_text(encoding="utf-8"))
    have = known.get(card.name) or known[MEASURED if (card.compute_capability or (0, 0)) >= (9, 0) else "older"]
    source = have["source"]
    if have is known[MEASURED] and card.name != MEASURED:
        source = f"not measured on this card: those {source}"
    sizes = {name: have[name] for name in ("context", "communicator")}
    return Constants(source=source, workspaces=tuple(have["workspaces"]), **sizes)
