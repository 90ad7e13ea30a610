"""Metrics by name, from torchmetrics, and the meter that sums them up.

torchmetrics is imported when a meter is made: it is slow to import and of no use before the first evaluation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from paceline.errors import RecipeError, nearest
from paceline.references import resolve, users_code
from paceline.seams import Batch, Meter

Named = Mapping[str, Callable[[int], Any]]
"""Metric name -> function of the number of classes that makes a torchmetrics metric."""


def classification_metrics() -> Named:
    """accuracy (micro), f1, precision and recall (macro), auroc (macro, exact), mcc."""
    from torchmetrics import classification as found

    return {
        "accuracy": lambda classes: found.MulticlassAccuracy(classes, average="micro", validate_args=False),
        "f1": lambda classes: found.MulticlassF1Score(classes, average="macro", validate_args=False),
        "precision": lambda classes: found.MulticlassPrecision(classes, average="macro", validate_args=False),
        "recall": lambda classes: found.MulticlassRecall(classes, average="macro", validate_args=False),
        "auroc": lambda classes: found.MulticlassAUROC(classes, average="macro", validate_args=False),
        "mcc": lambda classes: found.MulticlassMatthewsCorrCoef(classes, validate_args=False),
    }


def multi_label_metrics() -> Named:
    """accuracy (over all labels), exact_match, f1, precision, recall and auroc (macro)."""
    from torchmetrics import classification as found

    return {
        "accuracy": lambda labels: found.MultilabelAccuracy(labels, average="micro", validate_args=False),
        "exact_match": lambda labels: found.MultilabelExactMatch(labels, validate_args=False),
        "f1": lambda labels: found.MultilabelF1Score(labels, average="macro", validate_args=False),
        "precision": lambda labels: found.MultilabelPrecision(labels, average="macro", validate_args=False),
        "recall": lambda labels: found.MultilabelRecall(labels, average="macro", validate_args=False),
        "auroc": lambda labels: found.MultilabelAUROC(labels, average="macro", validate_args=False),
    }


def regression_metrics() -> Named:
    """mse, mae, r2, pearson and spearman."""
    from torchmetrics import regression as found

    return {
        "mse": lambda _: found.MeanSquaredError(),
        "mae": lambda _: found.MeanAbsoluteError(),
        "r2": lambda _: found.R2Score(),
        "pearson": lambda _: found.PearsonCorrCoef(),
        "spearman": lambda _: found.SpearmanCorrCoef(),
    }


def check_names(names: tuple[str, ...], known: Mapping[str, Any]) -> None:
    """Refuse a metric that the task does not have, or two that would be reported under one name.

    Raises:
        RecipeError: names the nearest metric.
    """
    for name in names:
        if ":" in name:
            resolve(name, "task.metrics", ("scores", "labels"))
        elif name not in known:
            raise RecipeError(
                f"task.metrics = {name}: unknown for this task",
                nearest(name, known),
                f"one of {', '.join(known)}, or module:function",
            )
    shown = reported(names)
    if twice := next((name for name in shown if shown.count(name) > 1), None):
        raise RecipeError(f"task.metrics: two are called {twice}", "only one could be reported", "rename the function")


def reported(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names in the results: ``loss``, and of ``module:function`` the function's."""
    return ("loss", *(name.rpartition(":")[2] for name in names))


class TorchMeter(Meter):
    """Loss and metrics of a split.

    Args:
        names: metric names; ``module:function(scores, labels) -> float`` keeps all scores on the host.
        known: torchmetrics by name.
        classes: number of classes or labels.
        device: where the sums are kept.
        loss_sum: the task's own.
        count: number of labels that a batch's weights stand for.
        scores: logits to what metrics compare: [S, C] or [S].
        confusion: count [true][predicted] too.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        known: Named,
        classes: int,
        device: torch.device,
        *,
        loss_sum: Callable[[Tensor, Batch], Tensor],
        labels_per_sample: int,
        scores: Callable[[Tensor], Tensor],
        confusion: bool,
    ) -> None:
        self._metrics = {name: known[name](classes).to(device) for name in names if ":" not in name}
        self._custom = {name: resolve(name, "task.metrics", ("scores", "labels")) for name in names if ":" in name}
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._loss_sum, self._scores, self._labels_per_sample = loss_sum, scores, labels_per_sample
        self._loss = torch.zeros((), device=device, dtype=torch.float64)
        self._count = torch.zeros((), device=device, dtype=torch.float64)
        self._matrix = torch.zeros(classes, classes, device=device, dtype=torch.int64) if confusion else None

    def update(self, logits: Tensor, batch: Batch) -> None:
        self._loss += self._loss_sum(logits, batch)
        self._count += batch.weights.sum() * self._labels_per_sample
        real = batch.weights > 0
        scores, labels = self._scores(logits.float())[real], batch.labels[real]
        targets = labels if labels.dtype == torch.int64 or logits.shape[-1] == 1 else labels.long()
        for metric in self._metrics.values():
            metric.update(scores, targets)
        if self._custom:
            self._kept.append((scores.cpu(), labels.cpu()))
        if self._matrix is not None:
            classes = len(self._matrix)
            pairs = labels * classes + scores.argmax(-1)
            self._matrix += torch.bincount(pairs, minlength=classes * classes).view(classes, classes)

    def compute(self) -> dict[str, float]:
        results = {"loss": float(self._loss / self._count)}
        with warnings.catch_warnings():
            # a split without one of the classes has no AUROC or F1 of it; torchmetrics warns and counts it as 0
            warnings.simplefilter("ignore", UserWarning)
            results |= {name: _computed(metric) for name, metric in self._metrics.items()}
        if self._custom:
            scores, labels = (torch.cat(part) for part in zip(*self._kept, strict=True))
            for name, function in self._custom.items():
                with users_code(f"task.metrics = {name}"):
                    results[name.rpartition(":")[2]] = float(function(scores, labels))
        return {name: value if math.isfinite(value) else math.nan for name, value in results.items()}

    def confusion(self) -> tuple[tuple[int, ...], ...] | None:
        if self._matrix is None:
            return None
        return tuple(tuple(cast("list[int]", row)) for row in self._matrix.tolist())


def _computed(metric: Any) -> float:
    """A metric's value; nan where so few samples have none, as R2 of a single one."""
    try:
        return float(metric.compute())
    except ValueError:
        return math.nan
