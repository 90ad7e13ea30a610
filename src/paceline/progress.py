"""Where a run is: what every record adds to, and every checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.data.order import OrderState
from paceline.records import EvaluationRecord, StepRecord


@dataclass(frozen=True)
class TrainSums:
    """Training loss and accuracy since the last evaluation, from the training forward passes themselves."""

    loss: float = 0.0
    counted: int = 0
    correct: float = 0.0

    def plus(self, record: StepRecord) -> TrainSums:
        """The sums with one step more; a skipped step's loss may be infinite and is left out."""
        if record.skipped:
            return self
        return TrainSums(
            self.loss + record.loss * record.counted,
            self.counted + record.counted,
            self.correct + (record.correct or 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; plain data, saved with every checkpoint."""

    order: OrderState
    step: int = 0
    applied: int = 0
    skipped_in_a_row: int = 0
    best: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    sums: TrainSums = TrainSums()
    samples: int = 0
    tokens: int = 0
    slots: int = 0
    evaluations: tuple[EvaluationRecord, ...] = ()

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Progress:
        """The inverse of ``plain``."""
        evaluations = tuple(
            EvaluationRecord(**{**e, "confusion": e["confusion"] and tuple(map(tuple, e["confusion"]))})
            for e in plain["evaluations"]
        )
        nested = {"order": OrderState(**plain["order"]), "sums": TrainSums(**plain["sums"]), "evaluations": evaluations}
        return cls(**{**plain, **nested})
