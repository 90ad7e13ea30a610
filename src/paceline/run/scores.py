"""Scores of the weights beside those of their average: which of both count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.contract.records import EvaluationRecord
from paceline.run.progress import metric_value


def counted(weights: EvaluationRecord, ema: EvaluationRecord, save: str, metric: str) -> EvaluationRecord:
    """One record of both measurements of a split: its loss and metrics are of what would be saved.

    Args:
        weights: of the trained weights. ema: of their average.
        save: ``weights``, ``ema``, or ``best``: whichever is better, the average where they are equal.
        metric: such as ``accuracy`` or ``-loss``, by which they are compared.
    """
    both = {"weights": weights, "ema": ema}
    of = max(("ema", "weights"), key=lambda name: _value(both[name], metric)) if save == "best" else save
    scores = {name: {"loss": found.loss, **found.metrics} for name, found in both.items()}
    return replace(both[of], of=of, scores=scores, seconds=weights.seconds + ema.seconds)


def saved(final: Mapping[str, EvaluationRecord], save: str) -> str:
    """What the saved model is made of, ``weights`` or ``ema``.

    Args:
        final: by split, what was measured at the end.
        save: the recipe's ``saves``, which counts where nothing was measured.
    """
    return next((found.of for found in final.values()), "weights" if save == "best" else save)


def _value(found: EvaluationRecord, metric: str) -> float:
    value = metric_value(found, metric)
    return -math.inf if math.isnan(value) else value
