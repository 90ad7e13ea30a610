"""The meter of tasks: sums a split up, over batches and over ranks, and computes its metrics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.references import resolve, users_code
from paceline.seams import Batch, Meter, World
from paceline.tasks.in_order import in_order
from paceline.tasks.metrics import Measured, OfScores, undefined


class Counts(NamedTuple):
    """One batch, summed up."""

    whole: Tensor
    """int64 [num_counts], added up in any order."""
    sums: Sequence[Tensor] = ()
    """Scalars, added up in fp64 in the order of the split."""


class Measures(ABC):
    """The metrics of one kind of task: which counts and sums they need, and how they follow from these."""

    label_names: Sequence[str]
    num_counts: int
    of_scores: Mapping[str, OfScores] = {}
    """Metrics for which the scores of the split are gathered in the first rank's main memory. The others keep none."""

    @abstractmethod
    def count(self, scores: Tensor, labels: Tensor) -> Counts:
        """Count a batch without filler, on its device; scores [S, C] or [S]."""

    @abstractmethod
    def measured(self, name: str, counts: Tensor, sums: Sequence[float], samples: int) -> Measured:
        """Compute one metric that is not of scores.

        Args:
            counts: int64 [num_counts] on the host. sums: over the split. samples: of the split, at least 1.
        """

    def confusion(self, counts: Tensor) -> tuple[tuple[int, ...], ...] | None:
        """Counts [true][predicted]; None where they are not counted."""
        return None


def needs_scores(names: Iterable[str], measures: type[Measures]) -> bool:
    """Whether one of these metrics is computed of all scores of a split at once."""
    return any(name in measures.of_scores or ":" in name for name in names)


_OWN_COUNTS = 2
"""Whole numbers after those of the measures: samples, and samples of NaN scores."""


@final
class SplitMeter(Meter):
    """Loss and metrics of a split, the same for any number of ranks.

    Whole numbers are added up as they come, in any order. Fractions (the loss, the squares of an error) are kept as one
    fp64 row a batch, and added in the order of the split. Scores are kept, on the host, only where a metric needs all:
    then the memory of ``merge`` on the first rank grows with the split, otherwise with its number of batches alone.

    Args:
        measures: the task's own.
        names: metric names; ``module:function(scores, labels) -> float`` keeps all scores.
        device: where the sums are kept.
        loss_sum: the task's own.
        divisor: scalar that a batch's ``loss_sum`` is divided by.
        scores: logits to what metrics compare: [S, C] or [S].
    """

    def __init__(
        self,
        measures: Measures,
        names: tuple[str, ...],
        device: torch.device,
        *,
        loss_sum: Callable[[Tensor, Batch], Tensor],
        divisor: Callable[[Batch], Tensor],
        scores: Callable[[Tensor], Tensor],
    ) -> None:
        self._measures, self._names, self._device = measures, names, device
        self._custom = {name: resolve(name, "task.metrics", ("scores", "labels")) for name in names if ":" in name}
        self._loss_sum, self._divisor, self._scores = loss_sum, divisor, scores
        self._counts = torch.zeros(measures.num_counts + _OWN_COUNTS, device=device, dtype=torch.int64)
        self._rows: list[Tensor] = []
        """fp64 [batches, 2 + sums] each: loss sum, what it is divided by, and the sums of the measures."""
        self._needs_scores = needs_scores(names, type(measures))
        self._kept: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Scores and labels on the host, where a metric needs all of them."""
        self._remarks: dict[str, str] = {}

    def update(self, logits: Tensor, batch: Batch) -> None:
        real = batch.weights > 0
        scores, labels = self._scores(logits.float())[real], batch.labels[real]
        counts = self._measures.count(scores, labels)
        row = [self._loss_sum(logits, batch), self._divisor(batch), *counts.sums]
        is_nan = scores.isnan().any(-1) if scores.ndim == 2 else scores.isnan()
        self._counts += torch.cat([counts.whole, torch.stack([real.sum(), is_nan.sum()])])
        self._rows.append(torch.cat([each.double().reshape(1, 1) for each in row], dim=1))
        if self._needs_scores:
            for kept, more in zip(self._kept, (scores, labels), strict=True):
                kept.append(more.cpu())

    def merge(self, world: World, places: Sequence[int]) -> None:
        self._counts = world.all_reduce(self._counts)
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
        return self._measures.confusion(self._counts[:-_OWN_COUNTS])

    def _measured(self, name: str, sums: Sequence[float]) -> Measured:
        """One metric. ``sums``: of the measures; empty where there are no samples."""
        samples, broken = self._counts[-_OWN_COUNTS:].tolist()
        if not samples:
            return undefined("there are no samples")
        if name in self._custom:
            scores, labels = (torch.cat(kept) for kept in self._kept)
            with users_code(f"task.metrics = {name}"):
                value = float(self._custom[name](scores, labels))
            return Measured(value) if math.isfinite(value) else undefined(f"the function returned {value}")
        if broken:
            return undefined("the model's outputs have NaN among them")
        measures = self._measures
        if name in measures.of_scores:
            scores, labels = (torch.cat(kept) for kept in self._kept)
            return measures.of_scores[name](scores.to(self._device), labels.to(self._device), measures.label_names)
        return measures.measured(name, self._counts[:-_OWN_COUNTS].cpu(), sums, samples)


def _sequential_sum(rows: Sequence[Tensor]) -> Tensor:
    """The sum of all rows, on the host. Numpy's, which never shares it out among threads: the same bits everywhere."""
    with np.errstate(invalid="ignore"):  # inf - inf is a nan, and meant
        return torch.from_numpy(torch.cat(list(rows)).cpu().numpy().sum(axis=0))
