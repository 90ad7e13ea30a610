"""Records, and facts, as JSON can carry them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

FORMERLY = "formerly"
"""Metadata of a field: the key that earlier releases gave it, which is written beside today's for one release."""


def plain(value: Any) -> Any:
    """A dataclass, or plain data with such in it, as JSON can carry it: figures that are no number are spelled out."""
    if value is None or type(value) in (int, bool):  # most of a step's numbers, and quicker than all that follows
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, str):
        # file names may hold bytes that are not text, which JSON cannot carry
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if is_dataclass(value):
        told = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        former = {each.metadata[FORMERLY]: told[each.name] for each in fields(value) if FORMERLY in each.metadata}
        return {**told, **former}
    return value
