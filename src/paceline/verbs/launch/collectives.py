"""Where ranks that waited for one another had come to, by what each of them told of its last collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.machine.cluster import named


def differences(told: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """What is said of each group whose ranks have not made the same collectives; nothing where all have.

    Args:
        told: rank -> what ``paceline.distributed.recorder.recorded`` gave there.
    """
    said = []
    for group in dict.fromkeys(group for groups in told.values() for group in groups):
        # a rank that has begun none of a part's may be no member of it
        of = {rank: groups[group] for rank, groups in sorted(told.items()) if group in groups}
        first = max(min(map(int, one["ops"])) for one in of.values())
        last = max(max(map(int, one["ops"])) for one in of.values())
        for number in range(first, last + 1):
            found = {rank: one["ops"].get(str(number), "none") for rank, one in of.items()}
            if len(set(found.values())) > 1:
                at = {rank: f"number {one['at']}, {one['ops'][str(one['at'])]}" for rank, one in of.items()}
                first_difference = f"the first that differs is number {number}: {_said(found, 'made')}"
                said.append(f"collectives of {group}: {_said(at, 'reached')}\n  {first_difference}")
                break
    return said


def _said(what: Mapping[int, str], verb: str) -> str:
    """``ranks 0-2 reached number 4, all_reduce of 8 Float; rank 3 reached ...``."""

    def those(text: str) -> Iterable[int]:
        return [rank for rank, other in what.items() if other == text]

    return "; ".join(f"{named([*those(text)])} {verb} {text}" for text in dict.fromkeys(what.values()))
