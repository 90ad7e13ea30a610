"""The meter of all tasks: sums a split up, over batches and over ranks, and computes its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.references import resolve, users_code
from paceline.seams import Batch, Meter, World
from paceline.tasks.in_order import in_order
from paceline.tasks.metrics import (
    CLASSIFICATION,
    MULTI_LABEL,
    OF_CLASS_SCORES,
    OF_NUMBERS,
    REGRESSION,
    ClassCounts,
    ErrorSums,
    Measured,
    OfScores,
    undefined,
)

KNOWN: Mapping[str, tuple[str, ...]] = {
    "classification": (*CLASSIFICATION, *OF_CLASS_SCORES),
    "multi_label": (*MULTI_LABEL, *OF_CLASS_SCORES),
    "regression": (*REGRESSION, *OF_NUMBERS),
}
"""Names of metrics by kind of task."""

OF_ALL_SCORES: Mapping[str, OfScores] = {**OF_CLASS_SCORES, **OF_NUMBERS}
"""Metrics for which the scores of the split are gathered in the first rank's main memory. The others keep none."""


def needs_scores(names: Iterable[str]) -> bool:
    """Whether one of these metrics is computed of all scores of a split at once."""
    return any(name in OF_ALL_SCORES or ":" in name for name in names)


_OWN_COUNTS = 3
"""Whole numbers beside those of classes: samples whose labels are all right, samples, and samples of NaN scores."""


@final
class SplitMeter(Meter):
    """Loss and metrics of a split, the same for any number of ranks.

    Whole numbers are added up as they come, in any order. Fractions (the loss, the squares of an error) are kept as one
    fp64 row a batch, and added in the order of the split. Scores are kept, on the host, only where a metric needs all:
    then the memory of ``merge`` on the first rank grows with the split, otherwise with its number of batches alone.

    Args:
        kind: ``classification``, ``multi_label`` or ``regression``.
        names: metric names; ``module:function(scores, labels) -> float`` keeps all scores.
        label_names: of the C classes or labels.
        device: where the sums are kept.
        loss_sum: the task's own.
        divisor: scalar that a batch's ``loss_sum`` is divided by.
        scores: logits to what metrics compare: [S, C] or [S].
        confusion: count [true][predicted] too.
        decided: scores to what is predicted, as metrics take labels; None: the likeliest class, or above one half.
    """

    def __init__(
        self,
        kind: str,
        names: tuple[str, ...],
        label_names: Sequence[str],
        device: torch.device,
        *,
        loss_sum: Callable[[Tensor, Batch], Tensor],
        divisor: Callable[[Batch], Tensor],
        scores: Callable[[Tensor], Tensor],
        confusion: bool = False,
        decided: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._kind, self._names, self._label_names, self._device = kind, names, label_names, device
        self._custom = {name: resolve(name, "task.metrics", ("scores", "labels")) for name in names if ":" in name}
        self._loss_sum, self._divisor, self._scores, self._decided = loss_sum, divisor, scores, decided
        self._classes = 0 if kind == "regression" else len(label_names)
        self._counts = torch.zeros(3 * self._classes + _OWN_COUNTS, device=device, dtype=torch.int64)
        """Right, predicted and true samples by class; then ``_OWN_COUNTS``."""
        matrix = self._classes if confusion else 0
        self._matrix = torch.zeros(matrix, matrix, device=device, dtype=torch.int64)
        self._rows: list[Tensor] = []
        """fp64 [batches, 2] each: loss sum and what it is divided by; of numbers also the fields of ``ErrorSums``."""
        self._needs_scores = needs_scores(names)
        self._kept: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Scores and labels on the host, where a metric needs all of them."""
        self._remarks: dict[str, str] = {}

    def update(self, logits: Tensor, batch: Batch) -> None:
        real = batch.weights > 0
        scores, labels = self._scores(logits.float())[real], batch.labels[real]
        row = [self._loss_sum(logits, batch), self._divisor(batch)]
        if self._kind == "regression":
            exact = torch.zeros((), device=labels.device, dtype=torch.int64)
            row += _error_sums(scores, labels)
        else:
            exact = self._count_classes(scores, labels)
        is_nan = scores.isnan().any(-1) if scores.ndim == 2 else scores.isnan()
        self._counts[-_OWN_COUNTS:] += torch.stack([exact, real.sum(), is_nan.sum()])
        self._rows.append(torch.cat([each.double().reshape(1, 1) for each in row], dim=1))
        if self._needs_scores:
            for kept, more in zip(self._kept, (scores, labels), strict=True):
                kept.append(more.cpu())

    def merge(self, world: World, places: Sequence[int]) -> None:
        counts = world.all_reduce(torch.cat([self._counts, self._matrix.flatten()]))
        self._counts = counts[: len(self._counts)]
        self._matrix = counts[len(self._counts) :].view_as(self._matrix)
        rows = torch.cat(self._rows).cpu().split(1) if self._rows else ()
        self._rows = in_order(world, places, rows, self._device)
        if self._needs_scores:
            scores, labels = (in_order(world, places, kept, self._device) for kept in self._kept)
            self._kept = scores, labels

    def compute(self) -> dict[str, float]:
        sums = _sequential_sum(self._rows).tolist() if self._rows else ()
        measured = {name.rpartition(":")[2]: self._measured(name, sums[2:]) for name in self._names}
        self._remarks = {name: remark for name, (_, remark) in measured.items() if remark}
        values = {"loss": sums[0] / sums[1] if sums and sums[1] else math.nan}
        values |= {name: value for name, (value, _) in measured.items()}
        return {name: value if math.isfinite(value) else math.nan for name, value in values.items()}

    def notices(self) -> tuple[str, ...]:
        return tuple(
            f"{', '.join(name for name, other in self._remarks.items() if other == remark)}: {remark}"
            for remark in dict.fromkeys(self._remarks.values())
        )

    def confusion(self) -> tuple[tuple[int, ...], ...] | None:
        if not len(self._matrix):
            return None
        return tuple(tuple(cast("list[int]", row)) for row in self._matrix.tolist())

    def _count_classes(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Add samples to the counts by class; returns how many have every label right."""
        decided = scores if self._decided is None else self._decided(scores)
        if self._kind == "multi_label":
            predicted, true = decided > 0.5, labels > 0.5
            by_class = [(predicted & true).sum(0), predicted.sum(0), true.sum(0)]
            self._counts[: 3 * self._classes] += torch.cat(by_class)
            return (predicted == true).all(-1).sum()
        predicted = decided if decided.ndim == 1 else decided.argmax(-1)
        is_right = predicted == labels
        by_class = [torch.bincount(each, minlength=self._classes) for each in (labels[is_right], predicted, labels)]
        self._counts[: 3 * self._classes] += torch.cat(by_class)
        if len(self._matrix):
            pairs = labels * self._classes + predicted
            self._matrix += torch.bincount(pairs, minlength=self._matrix.numel()).view_as(self._matrix)
        return is_right.sum()

    def _measured(self, name: str, sums: Sequence[float]) -> Measured:
        """One metric. ``sums``: fields of ``ErrorSums``; empty for classes, and where there are no samples."""
        exact, samples, broken = (int(count) for count in self._counts[-_OWN_COUNTS:])
        if not samples:
            return undefined("there are no samples")
        if name in self._custom:
            scores, labels = (torch.cat(kept) for kept in self._kept)
            with users_code(f"task.metrics = {name}"):
                value = float(self._custom[name](scores, labels))
            return Measured(value) if math.isfinite(value) else undefined(f"the function returned {value}")
        if broken:
            return undefined("the model's outputs have NaN among them")
        if name in OF_ALL_SCORES:
            scores, labels = (torch.cat(kept) for kept in self._kept)
            return OF_ALL_SCORES[name](scores.to(self._device), labels.to(self._device), self._label_names)
        if self._kind == "regression":
            return REGRESSION[name](ErrorSums(*sums))
        right, predicted, true = self._counts[:-_OWN_COUNTS].cpu().view(3, -1)
        is_multi_label = self._kind == "multi_label"
        counts = ClassCounts(right, predicted, true, exact, samples, self._label_names, is_multi_label)
        return (MULTI_LABEL if is_multi_label else CLASSIFICATION)[name](counts)


def _error_sums(scores: Tensor, labels: Tensor) -> list[Tensor]:
    """Scalars, the fields of ``ErrorSums`` for one batch."""
    away, exact = scores - labels, labels.double()
    samples = torch.tensor(len(labels), device=labels.device)
    return [samples, (away * away).sum(), away.abs().sum(), exact.sum(), (exact * exact).sum()]


def _sequential_sum(rows: Sequence[Tensor]) -> Tensor:
    """The sum of all rows, on the host. Numpy's, which never shares it out among threads: the same bits everywhere."""
    with np.errstate(invalid="ignore"):  # inf - inf is a nan, and meant
        return torch.from_numpy(torch.cat(list(rows)).cpu().numpy().sum(axis=0))
