"""Reporting the ranks that have not come yet, long before the time-out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from paceline.contract.streams import write_error
from paceline.machine.cluster import RENDEZVOUS, Place, named

REPORT_AFTER_SECONDS = 5.0


@final
class Waiting:
    """The wait of a rank for the others, reported once.

    Ranks of our launcher and of torchrun are watched by those, and say nothing.
    """

    def __init__(self, place: Place, timeout_seconds: float) -> None:
        self._place, self._timeout_seconds = place, timeout_seconds
        self._began = time.monotonic()
        self._is_reported = place.started in ("paceline", "torchrun")

    def report(self, address: str, missing: Callable[[], Sequence[int]]) -> None:
        """Report the missing ranks, once and after some seconds; of ranks that have met the first does.

        Args:
            address: where the ranks meet.
            missing: returns their numbers.
        """
        if self._is_reported or time.monotonic() - self._began < REPORT_AFTER_SECONDS:
            return
        self._is_reported = True
        place, ranks = self._place, missing()
        is_first = place.rank == min({*range(place.world_size)} - {*ranks})
        # without rank 0 the others have not met, and each may be alone at its terminal
        is_apart = ranks == [0] and (place.started == "environment" or place.local_rank == 0)
        if is_first or is_apart:
            is_by_variables = place.started == "environment" and place.init_method == "env://"
            alone = f"; or, to train in one process: unset {' '.join(RENDEZVOUS)}" * is_by_variables
            write_error(
                f"paceline: rank {place.rank} waits for {named(ranks)} of {place.world_size} at {address}, "
                f"for {self._timeout_seconds:g} s (--timeout)\n  fix: start {named(ranks)}{alone}"
            )
