"""Where the records of a run go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from paceline.contract.records import Notice, Observer, Record, StepRecord
from paceline.contract.redaction import without_credentials
from paceline.run.learned import LossCourse


@final
class Emitter:
    """Passes records on to observers, and keeps what the end of the run tells of them."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.losses = LossCourse()
        self._observers: Sequence[Observer] = ()

    def pass_on_to(self, observers: Sequence[Observer]) -> None:
        """From now on; before, records are only kept."""
        self._observers = observers

    def emit(self, record: Record) -> None:
        """Tell of ``record``; a notice without the credentials that it may hold."""
        if isinstance(record, Notice):
            record = replace(record, message=without_credentials(record.message))
            self.notices.append(record.message)
        if isinstance(record, StepRecord):
            self.losses.add(record)
        for observer in self._observers:
            observer.observe(record)
