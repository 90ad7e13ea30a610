"""What changed between the run that was saved and the run that would go on from it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.contract.errors import CheckpointError
from paceline.recipe import is_execution

_ABSENT = object()
_SHAPES_DATA = ("data", "model", "seed", "task")
"""Parts of a recipe that decide what the encoded samples are."""


@dataclass(frozen=True)
class Change:
    """A field whose value differs; ``old`` and ``new`` are shown as JSON."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """Changes between two resolved recipes: those that define the result, and those of execution.

    Both must be resolved by this version (``Recipe.parse(saved).resolved()``), so that a field it has and an
    earlier one had not counts as its default. A part that appears or goes as a whole is one change.
    """
    result_defining: list[Change] = []
    execution: list[Change] = []
    for change in _walk(old, new, ""):
        (execution if is_execution(change.path) else result_defining).append(change)
    return result_defining, execution


def refuse_changes(
    result_defining: Sequence[Change], allowed: Collection[str] = (), *, old_data: str = "", new_data: str = ""
) -> None:
    """Let a run go on only if nothing that defines its result changed, but for what was named on purpose.

    Args:
        result_defining: from ``differences``.
        allowed: dotted paths given with ``--set``. A path allows what is below it, and the part that it is in
            when that part appears or goes as a whole.
        old_data: fingerprint of the data that the saved run learned from; empty when unknown.
        new_data: fingerprint of the data found now. A change is allowed by any path that decides the samples.

    Raises:
        CheckpointError: lists every refused change as ``path: old -> new``.
    """
    refused = [change for change in result_defining if not any(_covers(path, change.path) for path in allowed)]
    lines = [str(change) for change in refused]
    shapes_data = any(path.split(".")[0] in _SHAPES_DATA for path in allowed)
    other_data = bool(old_data and new_data) and old_data != new_data and not shapes_data
    if other_data:
        lines.append(f"data (its content): {old_data[:16]} -> {new_data[:16]}")
    if not lines:
        return
    example = f"{refused[0].path}=VALUE" if refused else "data.source=VALUE"
    back = "change them back" if refused else "put the old content back"
    raise CheckpointError(
        "\n  ".join(["the run to resume was not like this one:", *lines]),
        "it would go on as neither the old run nor the new one",
        f"{back}; or --set {example} names a change on purpose; or start a new run with another --out",
    )


def _walk(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[Change]:
    for key in dict.fromkeys([*old, *new]):
        path = f"{prefix}{key}"
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        # a part that one side lacks is compared field by field: some of its fields may be of execution only
        inner = [{} if side is _ABSENT else side for side in (before, after)]
        if before == after:
            continue
        if all(isinstance(side, Mapping) for side in inner) and path != "model.config":
            yield from _walk(inner[0], inner[1], f"{path}.")
        elif _as_json(before) != _as_json(after):
            yield Change(path, _shown(before), _shown(after))


def _as_json(value: Any) -> str:
    """One line, control characters escaped; a tuple reads like the list that it is in a saved recipe."""
    return "(not set)" if value is _ABSENT else json.dumps(value, default=str)


def _shown(value: Any, limit: int = 200) -> str:
    text = _as_json(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _covers(allowed: str, path: str) -> bool:
    return path == allowed or path.startswith(f"{allowed}.") or allowed.startswith(f"{path}.")
