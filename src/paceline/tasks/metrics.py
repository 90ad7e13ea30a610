"""Metrics by name: formulas of counts, of sums, and of all scores of a split.

Values are those of scikit-learn and scipy, but where a value is undefined: there it is NaN, never a figure. A remark
says so, and where a metric leaves classes out or counts them as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.errors import RecipeError, excerpt, nearest
from paceline.contract.label_names import listed
from paceline.contract.references import resolve

_ROUNDING = 1e-12
"""Values whose squared deviations are this share of their squares, or less, are equal but for fp32's rounding."""

_MOST_NAMED = 5
"""Classes that a remark names."""


class Measured(NamedTuple):
    """A metric's value, NaN where it is undefined, and a remark on it for people; mostly empty."""

    value: float
    remark: str = ""


@final
@dataclass(frozen=True)
class ClassCounts:
    """Samples of a split by class, or by label where a sample has any number of them.

    Args:
        right: int64 [C], predicted and true. predicted: int64 [C]. true: int64 [C].
        exact: samples of which every label is right.
        samples: of the split.
        label_names: of the C classes.
        multi_label: whether each label is decided by itself.
    """

    right: Tensor
    predicted: Tensor
    true: Tensor
    exact: int
    samples: int
    label_names: Sequence[str]
    multi_label: bool

    def named(self, which: Tensor) -> str:
        """Names of the classes where ``which``, bool [C], is true."""
        names = [excerpt(self.label_names[at], 40) for at in which.nonzero().flatten().tolist()]
        return listed(names, _MOST_NAMED)


@final
@dataclass(frozen=True)
class ErrorSums:
    """Sums over the samples of a split of numbers; fp32 values, added up in fp64.

    Args:
        samples: their number. squared_errors, absolute_errors: of predictions.
        labels, squared_labels: what is to be predicted.
    """

    samples: float
    squared_errors: float
    absolute_errors: float
    labels: float
    squared_labels: float


OfCounts = Callable[[ClassCounts], Measured]
OfSums = Callable[[ErrorSums], Measured]
OfScores = Callable[[Tensor, Tensor, Sequence[str]], Measured]
"""(scores, labels, label names) -> value; scores [n, C] or [n], labels [n] or [n, C], on one device."""


def _mean_over_classes(counts: ClassCounts, shares: Tensor) -> float:
    """Macro average of fp32 [C]; of single labels, classes that neither occur nor are predicted are left out."""
    present = torch.ones_like(shares)
    if not counts.multi_label:
        present[counts.predicted + counts.true == 0] = 0.0
    return float((present * shares / present.sum()).sum())


def accuracy(counts: ClassCounts) -> Measured:
    """The share of right samples (micro); of single labels among all labels of all samples."""
    right, total = counts.right.sum(), counts.true.sum()
    if counts.multi_label:
        total = torch.tensor(counts.samples * len(counts.true))
        right = total - counts.predicted.sum() - counts.true.sum() + 2 * right
    return Measured(float(right.float() / total.float()))


def exact_match(counts: ClassCounts) -> Measured:
    """The share of samples of which every label is right."""
    return Measured(float(torch.tensor(float(counts.exact)) / float(counts.samples)))


def f1(counts: ClassCounts) -> Measured:
    """Macro F1: 0 for a label that no sample has, whatever is predicted."""
    found = _mean_over_classes(counts, _ratio(2 * counts.right, counts.predicted + counts.true))
    absent = counts.true == 0
    if not (counts.multi_label and absent.any()):
        return Measured(found)
    return Measured(found, _counted_as_nothing(counts.named(absent)))


def precision(counts: ClassCounts) -> Measured:
    """Macro precision: 0 for a class that occurs and is never predicted."""
    found = _mean_over_classes(counts, _ratio(counts.right, counts.predicted))
    unpredicted = (counts.predicted == 0) & (torch.tensor(counts.multi_label) | (counts.true > 0))
    remark = "a class that is never predicted is counted as 0, as in scikit-learn"
    return Measured(found, remark if unpredicted.any() else "")


def recall(counts: ClassCounts) -> Measured:
    """Macro recall: 0 for a class that no sample has and that is predicted, and for a label that no sample has."""
    found = _mean_over_classes(counts, _ratio(counts.right, counts.true))
    absent = (counts.true == 0) & (torch.tensor(counts.multi_label) | (counts.predicted > 0))
    if not absent.any():
        return Measured(found)
    return Measured(found, _counted_as_nothing(counts.named(absent)))


def mcc(counts: ClassCounts) -> Measured:
    """Matthews' correlation; 0 where labels or predictions are all of one class.

    Like scikit-learn (Gorodkin 2004, https://doi.org/10.1016/j.compbiolchem.2004.09.006).
    """
    true, predicted, total = counts.true.double(), counts.predicted.double(), float(counts.samples)
    spread = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    if spread > 0:
        return Measured(float((counts.right.sum() * total - true @ predicted) / spread.sqrt()))
    which = "samples" if (true > 0).sum() == 1 else "predictions"
    return Measured(0.0, f"0, as in scikit-learn: all {which} are of one class")


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """fp32 [C]; 0 where there is no whole."""
    return torch.where(whole > 0, part.float() / whole.float(), 0.0)


def mse(sums: ErrorSums) -> Measured:
    """The mean squared error."""
    return Measured(float(torch.tensor(sums.squared_errors).float() / sums.samples))


def mae(sums: ErrorSums) -> Measured:
    """The mean absolute error."""
    return Measured(float(torch.tensor(sums.absolute_errors).float() / sums.samples))


def r2(sums: ErrorSums) -> Measured:
    """The coefficient of determination; undefined where there is nothing to explain."""
    spread = sums.squared_labels - sums.labels**2 / sums.samples
    if spread <= _ROUNDING * sums.squared_labels:
        return undefined(_all_equal("labels", sums.samples))
    return Measured(1 - sums.squared_errors / spread)


def _auroc(scores: Tensor, labels: Tensor, label_names: Sequence[str]) -> Measured:
    """The mean over classes of the area under one class's ROC curve against the rest (macro, exact).

    Only of a class that some samples have and some have not there is a curve: others are left out of the mean.
    """
    of_each = [_area(scores[:, c], labels == c if labels.ndim == 1 else labels[:, c] > 0.5) for c in _columns(scores)]
    areas = [area for area in of_each if area is not None]
    left_out = [excerpt(name, 40) for name, area in zip(label_names, of_each, strict=True) if area is None]
    if not areas:
        return undefined(
            "all samples are of one class" if labels.ndim == 1 else "each label is on all samples or on none"
        )
    remark = f"the mean over {len(areas):,} of {len(of_each):,} classes, without {listed(left_out, _MOST_NAMED)}"
    reason = "which no sample has" if labels.ndim == 1 else "which no sample has, or every one"
    # fp32 [C], as metrics of counts are averaged
    return Measured(float(torch.tensor(areas).mean()), f"{remark}, {reason}" if left_out else "")


def _columns(scores: Tensor) -> range:
    return range(scores.shape[1])


def _area(scores: Tensor, is_so: Tensor) -> float | None:
    """The chance that a sample which is so has the higher score than one that is not, ties counted half.

    That is the area under the ROC curve (Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747).

    Args:
        scores: [n]. is_so: bool [n].

    Returns:
        None where all samples are so, or none. Whole numbers are added up, so devices and threads change no bit.
    """
    values, places = scores.unique(return_inverse=True)
    above = torch.bincount(places[is_so], minlength=len(values))
    below = torch.bincount(places[~is_so], minlength=len(values))
    pairs = int(above.sum()) * int(below.sum())
    if not pairs:
        return None
    twice = (above * (2 * (below.cumsum(0) - below) + below)).sum()
    return int(twice) / (2 * pairs)


def _pearson(scores: Tensor, labels: Tensor, _: Sequence[str]) -> Measured:
    """The linear correlation of predictions and labels."""
    return _correlation(scores.double().cpu().numpy(), labels.double().cpu().numpy())


def _spearman(scores: Tensor, labels: Tensor, _: Sequence[str]) -> Measured:
    """The correlation of their ranks, equal values sharing the mean of theirs."""
    for values, what in ((labels, "labels"), (scores, "predictions")):
        if _spread(values.double().cpu().numpy()) is None:
            return undefined(_all_equal(what, len(values)))
    return _correlation(_ranks(scores), _ranks(labels))


def _ranks(values: Tensor) -> NDArray[np.float64]:
    """From 1; equal values share the mean of their ranks."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    means: Tensor = last.double().cpu() - (counts.double().cpu() - 1) / 2
    ranks: NDArray[np.float64] = means[places.cpu()].numpy()
    return ranks


def _correlation(predicted: NDArray[np.float64], labels: NDArray[np.float64]) -> Measured:
    """Pearson's, of fp64 [n]. Numpy never shares a sum out among threads: the same bits everywhere."""
    spreads = []
    for values, what in ((labels, "labels"), (predicted, "predictions")):
        spread = _spread(values)
        if spread is None:
            return undefined(_all_equal(what, len(values)))
        spreads.append(spread)
    with np.errstate(invalid="ignore"):  # of infinite predictions there is none
        together = ((predicted - predicted.mean()) * (labels - labels.mean())).sum()
    found = float(together) / math.sqrt(spreads[0]) / math.sqrt(spreads[1])
    return Measured(max(-1.0, min(1.0, found)) if math.isfinite(found) else math.nan)


def _spread(values: NDArray[np.float64]) -> float | None:
    """The sum of squared deviations from the mean; None where all values are equal, but for fp32's rounding."""
    with np.errstate(invalid="ignore"):
        spread, squares = float(((values - values.mean()) ** 2).sum()), float((values**2).sum())
    return None if spread <= _ROUNDING * squares else spread


def undefined(reason: str) -> Measured:
    """NaN, with the reason in the remark."""
    return Measured(math.nan, f"undefined (NaN): {reason}")


def _counted_as_nothing(names: str) -> str:
    return f"{names} counted as 0, as in scikit-learn: no sample has it"


def _all_equal(what: str, samples: float) -> str:
    return f"all {what} are equal" if samples > 1 else "there is one sample"


OF_CLASS_SCORES: Mapping[str, OfScores] = {"auroc": _auroc}
"""Metrics of classes that are no sum over batches: they are computed once, of all scores of the split."""

OF_NUMBERS: Mapping[str, OfScores] = {"pearson": _pearson, "spearman": _spearman}
"""Metrics of numbers that are no sum over batches."""


def check_names(names: tuple[str, ...], known: Sequence[str]) -> None:
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
