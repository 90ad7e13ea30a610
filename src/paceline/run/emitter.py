"""Where the records of a run go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from paceline.contract.records import EvaluationRecord, Notice, Observer, Record, StepRecord
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
        """Pass ``record`` on; a notice without the credentials that it may hold, an evaluation's notices once a run."""
        if isinstance(record, EvaluationRecord):
            for message in (f"{record.split}: {notice}" for notice in record.notices):
                if message not in self.notices:
                    self.emit(Notice(message=message, level="warning"))
        if isinstance(record, Notice):
            record = replace(record, message=without_credentials(record.message))
            self.notices.append(record.message)
        if isinstance(record, StepRecord):
            self.losses.add(record)
        for observer in self._observers:
            observer.observe(record)
