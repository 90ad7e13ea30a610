"""Where a run is: what every record adds to, and every checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.contract.records import EvaluationRecord, LossScaling, StepRecord
from paceline.data.order import OrderState

SHARP = 0.1
"""A metric that has lost this share of its best value fell, and did not waver."""


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

    def metrics(self, *, counts_right: bool) -> dict[str, float]:
        """What the sums come to; empty where nothing was counted.

        Args:
            counts_right: whether the task has right predictions.
        """
        if not self.counted:
            return {}
        loss = {"loss": self.loss / self.counted}
        return {**loss, "accuracy": self.correct / self.counted} if counts_right else loss


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
    scaling: LossScaling | None = None

    def fall(self, metric: str) -> str:
        """How far the newest evaluation is behind the best, in words; empty where that is no more than usual.

        Args:
            metric: such as ``accuracy`` or ``-loss``, which ``best`` is a value of.
        """
        if self.best is None or self.best_step is None or not self.evaluations:
            return ""
        newest, name, sign = self.evaluations[-1], metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0
        value = metric_value(newest, metric)
        if value >= self.best - SHARP * abs(self.best):  # of NaN this does not hold
            return ""
        was, now = f"{sign * self.best:.4g} at step {self.best_step:,}", f"{sign * value:.4g} at step {newest.step:,}"
        return f"validation {name} went from {was} to {now}"

    def judged_anew(self) -> Progress:
        """The same steps without a best one: what was measured before cannot be compared with what will be."""
        return replace(self, best=None, best_step=None, evaluations_without_gain=0, evaluations=())

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Progress:
        """The inverse of ``plain``."""
        evaluations = tuple(
            EvaluationRecord(
                **{
                    **e,
                    "confusion": e["confusion"] and tuple(map(tuple, e["confusion"])),
                    "notices": tuple(e.get("notices", ())),
                }
            )
            for e in plain["evaluations"]
        )
        scaling = LossScaling(**plain["scaling"]) if plain.get("scaling") else None
        nested = {"order": OrderState(**plain["order"]), "sums": TrainSums(**plain["sums"]), "evaluations": evaluations}
        nested["scaling"] = scaling
        return cls(**{**plain, **nested})


def with_step(scaling: LossScaling | None, record: StepRecord) -> LossScaling | None:
    """What loss scaling did, with one step more; None without it."""
    scale, share = record.loss_scale, record.zero_share
    if scale is None:
        return scaling
    before = scaling or LossScaling(lowest=scale, highest=scale, last=scale)
    counted, mean = before.counted, before.zero_share
    if share is not None and not record.skipped:  # gradients that overflowed tell nothing of those that vanish
        counted += 1
        mean = share if mean is None else mean + (share - mean) / counted
    return LossScaling(
        lowest=min(before.lowest, scale),
        highest=max(before.highest, scale),
        last=scale,
        skipped=before.skipped + record.skipped,
        counted=counted,
        zero_share=mean,
    )


def metric_value(found: EvaluationRecord, name: str) -> float:
    """The value of a metric such as ``accuracy`` or ``-loss``, higher is better."""
    sign, plain = (-1.0, name[1:]) if name.startswith("-") else (1.0, name)
    return sign * (found.loss if plain == "loss" else found.metrics[plain])
