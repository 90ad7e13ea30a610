"""What a run says at its end when it learned nothing, or not more than something far simpler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.data.dataset import Dataset
from paceline.data.task_rows import Constant, rows_of
from paceline.observe.formats import figure
from paceline.run.progress import metric_value

FEW = 5
"""Steps whose losses are averaged at either end of a run."""

RISE = 10.0
"""A loss that has grown by this factor did not waver."""


@dataclass
class LossCourse:
    """The training loss in the first and in the last few steps of this start."""

    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FEW))

    def add(self, record: StepRecord) -> None:
        if record.skipped or not math.isfinite(record.loss):
            return
        if len(self.first) < FEW:
            self.first.append(record.loss)
        self.last.append(record.loss)

    def rise(self, evaluations: tuple[EvaluationRecord, ...]) -> str:
        """How far the loss rose, in words; empty where it did not by orders of magnitude.

        Args:
            evaluations: those of the whole run; a run that went on may have begun at a low loss.
        """
        if not self.first:
            return ""
        early = [found.train_metrics["loss"] for found in evaluations[:1] if "loss" in found.train_metrics]
        before, after = max(self.first[0], *early) if early else self.first[0], sum(self.last) / len(self.last)
        if after < RISE * before:
            return ""
        rose = f"the training loss rose from {figure(before)} to {figure(after)}"
        return f"{rose}: a smaller optimizer.lr or a longer schedule.warmup keeps it down"


def held_out(final: Mapping[str, EvaluationRecord]) -> EvaluationRecord | None:
    """The final measurement that tells most: of the test split, else of the validation split."""
    return final.get("test") or final.get("validation")


def nothing_learned(final: Mapping[str, EvaluationRecord], dataset: Dataset) -> str:
    """That the saved model tells samples no better apart than a constant, in words; empty where it does."""
    found = held_out(final)
    if found is None:
        return ""
    train, held = (dataset.labels[dataset.splits[split]] for split in ("train", found.split))
    constant = rows_of(dataset.kind).constant(train, held, dataset.label_names)
    if constant is None:
        return ""
    predicted = np.flatnonzero(np.sum(found.confusion, 0)) if found.confusion else np.arange(2)
    if len(predicted) == 1 and found.samples > 1:
        name = dataset.label_names[int(predicted[0])]
        every = f"all {found.samples:,} predictions on {found.split} are {name!r}"
        learned_nothing = "the model learned nothing that tells them apart"
        return f"{every}: {learned_nothing}; always guessing {constant.guess}, scores {constant.score:.4g}"
    return _no_better(found, constant)


def _no_better(found: EvaluationRecord, constant: Constant) -> str:
    metric, sign = constant.metric.removeprefix("-"), -1.0 if constant.metric.startswith("-") else 1.0
    value = found.metrics.get(metric)
    if value is None and metric == "accuracy" and found.confusion:
        value = float(np.trace(found.confusion)) / max(found.samples, 1)
    if value is None or sign * value > sign * constant.score + constant.rounding:
        return ""
    guess = f"always guessing {constant.guess}, which scores {constant.score:.4g}"
    return f"{found.split} {metric} {value:.4g} is no better than {guess}"


def no_better_than(
    name: str, scores: Mapping[str, Mapping[str, float]], final: Mapping[str, EvaluationRecord], metric: str
) -> str:
    """That the model is no better than a baseline, in words; empty where it is.

    Args:
        name: of the baseline. scores: its metrics by split.
        metric: such as ``accuracy`` or ``-loss``, by which the best model is told.
    """
    found = held_out(final)
    if found is None or found.split not in scores:
        return ""
    plain, sign = metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0
    ours, theirs = metric_value(found, metric), sign * scores[found.split][plain]
    if ours > theirs:
        return ""
    best = f"{found.split} {plain} {figure(sign * ours)} is no better than {figure(sign * theirs)} of {name}"
    return f"{best}, fitted on the same training texts"
