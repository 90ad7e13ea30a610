"""What a run says at its end when it learned nothing, or not more than something far simpler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.data.dataset import Dataset
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
    if dataset.kind == "regression":
        return _no_better_than_mean(found, float(np.mean((held - train.mean()) ** 2)))
    if dataset.kind == "multi_label":
        scored = float(np.mean(held == (train.mean(0) > 0.5)))
        return _no_better(found, scored, "what is more frequent of each label")
    counts = np.bincount(train, minlength=len(dataset.label_names))
    if np.count_nonzero(counts) < 2:
        return ""  # asked for: data of a single class
    most = int(counts.argmax())
    scored = float(np.mean(held == most))
    guess = f"{dataset.label_names[most]!r}, the most frequent training label"
    predicted = np.flatnonzero(np.sum(found.confusion, 0)) if found.confusion else np.arange(2)
    if len(predicted) == 1 and found.samples > 1:
        name = dataset.label_names[int(predicted[0])]
        every = f"all {found.samples:,} predictions on {found.split} are {name!r}"
        return f"{every}: the model learned nothing that tells them apart; always guessing {guess}, scores {scored:.4g}"
    return _no_better(found, scored, guess)


def _no_better(found: EvaluationRecord, scored: float, guess: str) -> str:
    accuracy = found.metrics.get("accuracy")
    if accuracy is None and found.confusion:
        accuracy = float(np.trace(found.confusion)) / max(found.samples, 1)
    if accuracy is None or accuracy > scored + 1e-6:  # metrics are fp32
        return ""
    return f"{found.split} accuracy {accuracy:.4g} is no better than always guessing {guess}, which scores {scored:.4g}"


def _no_better_than_mean(found: EvaluationRecord, spread: float) -> str:
    error = found.metrics.get("mse")
    if error is None or error < spread:
        return ""
    mean = "always guessing the mean of the training labels"
    return f"{found.split} mse {error:.4g} is no better than {mean}, which scores {spread:.4g}"


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
