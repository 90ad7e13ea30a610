"""Metrics by name, from torchmetrics, and the meter that sums them up, over batches and over ranks.

torchmetrics is imported when a metric is made: it takes a second or two, five where it finds transformers and
torchvision to load, and is of no use before the first evaluation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from paceline.contract.errors import RecipeError, nearest
from paceline.contract.references import resolve, users_code
from paceline.seams import Batch, Meter, World
from paceline.tasks.in_order import in_order

Named = Mapping[str, Callable[[int], Any]]
"""Metric name -> function of the number of classes that makes a torchmetrics metric."""

OF_ALL_SCORES = frozenset({"auroc", "pearson", "spearman"})
"""Metrics that are no sum over batches: they are computed once, of all scores of the split, in the first rank's main
memory. The others keep none."""

_SETTINGS = {"sync_on_compute": False}
"""torchmetrics would gather each state of each metric by itself, on whatever process group it finds."""

_CLASS_SETTINGS = {**_SETTINGS, "validate_args": False}


def classification_metrics() -> Named:
    """accuracy (micro), f1, precision and recall (macro), auroc (macro, exact), mcc."""
    return {
        "accuracy": _of_classes("MulticlassAccuracy", average="micro"),
        "f1": _of_classes("MulticlassF1Score", average="macro"),
        "precision": _of_classes("MulticlassPrecision", average="macro"),
        "recall": _of_classes("MulticlassRecall", average="macro"),
        "auroc": _of_classes("MulticlassAUROC", average="macro"),
        "mcc": _of_classes("MulticlassMatthewsCorrCoef"),
    }


def multi_label_metrics() -> Named:
    """accuracy (over all labels), exact_match, f1, precision, recall and auroc (macro)."""
    return {
        "accuracy": _of_classes("MultilabelAccuracy", average="micro"),
        "exact_match": _of_classes("MultilabelExactMatch"),
        "f1": _of_classes("MultilabelF1Score", average="macro"),
        "precision": _of_classes("MultilabelPrecision", average="macro"),
        "recall": _of_classes("MultilabelRecall", average="macro"),
        "auroc": _of_classes("MultilabelAUROC", average="macro"),
    }


def regression_metrics() -> Named:
    """mse, mae, r2, pearson and spearman."""
    return {
        "mse": _of_numbers("MeanSquaredError"),
        "mae": _of_numbers("MeanAbsoluteError"),
        "r2": _of_numbers("R2Score"),
        "pearson": _of_numbers("PearsonCorrCoef"),
        "spearman": _of_numbers("SpearmanCorrCoef"),
    }


def _of_classes(kind: str, **settings: Any) -> Callable[[int], Any]:
    def made(classes: int) -> Any:
        from torchmetrics import classification

        return getattr(classification, kind)(classes, **_CLASS_SETTINGS, **settings)

    return made


def _of_numbers(kind: str) -> Callable[[int], Any]:
    def made(_: int) -> Any:
        from torchmetrics import regression

        return getattr(regression, kind)(**_SETTINGS)

    return made


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


@final
class TorchMeter(Meter):
    """Loss and metrics of a split, the same for any number of ranks.

    Whole numbers are added up as they come, in any order. Fractions (the loss, the squares of an error) are kept as one
    fp64 row a batch, and added in the order of the split. Scores are kept, on the host, only where a metric needs all:
    then the memory of ``merge`` on the first rank grows with the split, otherwise with its number of batches alone.

    Args:
        names: metric names; ``module:function(scores, labels) -> float`` keeps all scores.
        known: torchmetrics by name.
        classes: number of classes or labels.
        device: where the sums are kept.
        loss_sum: the task's own.
        divisor: scalar that a batch's ``loss_sum`` is divided by.
        scores: logits to what metrics compare: [S, C] or [S].
        confusion: count [true][predicted] too.
        decided: scores to what is predicted, as metrics take labels; None: the likeliest class, or above one half.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        known: Named,
        classes: int,
        device: torch.device,
        *,
        loss_sum: Callable[[Tensor, Batch], Tensor],
        divisor: Callable[[Batch], Tensor],
        scores: Callable[[Tensor], Tensor],
        confusion: bool,
        decided: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._names, self._device = names, device
        with _quiet():
            made = {name: known[name](classes).to(device) for name in names if ":" not in name}
        self._custom = {name: resolve(name, "task.metrics", ("scores", "labels")) for name in names if ":" in name}
        self._of_scores = {name: metric for name, metric in made.items() if name in OF_ALL_SCORES}
        self._of_sums = {name: metric for name, metric in made.items() if name not in OF_ALL_SCORES}
        self._fractions = [metric for metric in self._of_sums.values() if _has_fractions(metric)]
        self._counts = [metric for metric in self._of_sums.values() if not _has_fractions(metric)]
        self._loss_sum, self._divisor, self._scores, self._decided = loss_sum, divisor, scores, decided
        self._matrix = torch.zeros(classes, classes, device=device, dtype=torch.int64) if confusion else None
        self._rows: list[Tensor] = []
        """fp64 [batches, 2 + fractions] each: loss sum, what it is divided by, and the states of ``_fractions``."""
        self._needs_scores = bool(self._of_scores or self._custom)
        self._kept: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Scores and labels on the host, where a metric needs all of them."""

    def update(self, logits: Tensor, batch: Batch) -> None:
        real = batch.weights > 0
        scores, labels = self._scores(logits.float())[real], batch.labels[real]
        decided = scores if self._decided is None else self._decided(scores)
        for metric in self._of_sums.values():
            metric.update(decided, _targets(scores, labels))
        sums = [self._loss_sum(logits, batch), self._divisor(batch)]
        for metric in self._fractions:
            sums += metric.metric_state.values()
            metric.reset()
        self._rows.append(torch.cat([each.double().reshape(1, -1) for each in sums], dim=1))
        if self._needs_scores:
            for kept, more in zip(self._kept, (scores, labels), strict=True):
                kept.append(more.cpu())
        if self._matrix is not None:
            classes = len(self._matrix)
            pairs = labels * classes + (decided if decided.ndim == 1 else decided.argmax(-1))
            self._matrix += torch.bincount(pairs, minlength=classes * classes).view(classes, classes)

    def merge(self, world: World, places: Sequence[int]) -> None:
        self._add_counts(world)
        rows = torch.cat(self._rows).cpu().split(1) if self._rows else ()
        self._rows = in_order(world, places, rows, self._device)
        if self._needs_scores:
            scores, labels = (in_order(world, places, kept, self._device) for kept in self._kept)
            self._kept = scores, labels

    def compute(self) -> dict[str, float]:
        loss = self._computed_of_rows()
        found = {
            name: _mcc(metric.metric_state["confmat"]) if name == "mcc" else _computed(metric)
            for name, metric in self._of_sums.items()
        }
        found |= self._computed_of_scores()
        for metric in self._fractions:
            metric.reset()  # what it was given is in the rows
        values = {"loss": loss, **{name.rpartition(":")[2]: found[name] for name in self._names}}
        return {name: value if math.isfinite(value) else math.nan for name, value in values.items()}

    def confusion(self) -> tuple[tuple[int, ...], ...] | None:
        if self._matrix is None:
            return None
        return tuple(tuple(cast("list[int]", row)) for row in self._matrix.tolist())

    def _add_counts(self, world: World) -> None:
        """Add up whole numbers over the ranks, all of them at once."""
        counts = [state for metric in self._counts for state in metric.metric_state.values()]
        counts += [self._matrix] if self._matrix is not None else []
        if not counts:
            return
        added = world.all_reduce(torch.cat([count.reshape(-1) for count in counts]))
        for count, sums in zip(counts, added.split([count.numel() for count in counts]), strict=True):
            count.copy_(sums.view_as(count))

    def _computed_of_rows(self) -> float:
        """The loss; nan where there are no samples. Metrics that add fractions are given their sums."""
        if not self._rows:
            return math.nan
        sums = _sequential_sum(self._rows)
        loss, sums = float(sums[0] / sums[1]), sums[2:]
        for metric in self._fractions:
            for name, state in metric.metric_state.items():
                setattr(metric, name, sums[: state.numel()].view_as(state).to(state))
                sums = sums[state.numel() :]
        return loss

    def _computed_of_scores(self) -> dict[str, float]:
        """Metrics of all scores; nan where there are none at all."""
        if not self._needs_scores or not self._kept[0]:
            return dict.fromkeys((*self._of_scores, *self._custom), math.nan)
        scores, labels = (torch.cat(kept) for kept in self._kept)
        found = {}
        for name, metric in self._of_scores.items():
            metric.update(scores.to(self._device), _targets(scores, labels).to(self._device))
            # torchmetrics would rank NaN as if it were a number
            found[name] = math.nan if scores.isnan().any() else _computed(metric)
            metric.reset()
        for name, function in self._custom.items():
            with users_code(f"task.metrics = {name}"):
                found[name] = float(function(scores, labels))
        return found


def _has_fractions(metric: Any) -> bool:
    """Whether its sums depend, in their last bits, on the order in which batches are added."""
    return any(state.is_floating_point() for state in metric.metric_state.values())


def _targets(scores: Tensor, labels: Tensor) -> Tensor:
    """Labels as torchmetrics takes them: whole numbers, but for regression, whose scores are [S]."""
    return labels if scores.ndim == 1 else labels.long()


def _sequential_sum(rows: Sequence[Tensor]) -> Tensor:
    """The sum of all rows, on the host. Numpy's, which never shares it out among threads: the same bits everywhere."""
    with np.errstate(invalid="ignore"):  # inf - inf is a nan, and meant
        return torch.from_numpy(torch.cat(list(rows)).cpu().numpy().sum(axis=0))


def _computed(metric: Any) -> float:
    """A metric's value; nan where so few samples have none, as R2 of a single one."""
    try:
        with _quiet():
            return float(metric.compute())
    except ValueError:
        return math.nan


def _mcc(matrix: Tensor) -> float:
    """Matthews' correlation of counts [C, C], true by predicted; 0 where labels or predictions are all of one class.

    Like scikit-learn (Gorodkin 2004, https://doi.org/10.1016/j.compbiolchem.2004.09.006); torchmetrics has other values
    there.
    """
    counts = matrix.double().cpu()
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    spread = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    return float((counts.trace() * total - true @ predicted) / spread.sqrt()) if spread > 0 else 0.0


def _quiet() -> warnings.catch_warnings[None]:
    """A split without one of the classes has no AUROC or F1 of it: torchmetrics counts it as 0, and warns."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
