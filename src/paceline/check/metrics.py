"""Loss and metrics are those of a plain computation, sample by sample."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.plain import plain_logits, plain_loss
from paceline.check.subject import Subject
from paceline.engine.evaluate import evaluate, inference
from paceline.tasks.plain import plain_task

CLOSE = 2e-4
"""Difference up to which two numbers are the same, relative to the larger, or to 1."""


def check(subject: Subject) -> str:
    """An evaluation in uneven batches beside each sample by itself."""
    with subject.numbers():
        _, build = subject.build(*subject.calm)
        name, ids = subject.held_out
        size = max(1, (len(ids) + 1) // 3 + 1)
        found = evaluate(inference(build), build, name, ids, size, step=0, epoch=0)
        model = subject.model(still=True).to(subject.device)
        with torch.no_grad():
            logits = plain_logits(subject, model, ids)
    labels = np.array(subject.dataset.labels[ids])
    expected = scores(subject, logits, labels)
    with contextlib.suppress(NotApplicable):
        expected["loss"] = float(plain_loss(subject, logits, ids))
    values = {"loss": found.loss, **found.metrics}
    compared = [metric for metric in values if metric in expected]
    if not compared:
        raise NotApplicable(f"none of {', '.join(values)} is worked out here")
    if found.samples != len(ids):
        raise Broken(f"{found.samples} samples were counted, and there are {len(ids)}", tensor="samples")
    for metric in compared:
        close(metric, expected[metric], values[metric])
    others = [metric for metric in values if metric not in expected]
    left = f"; not worked out: {', '.join(others)}" if others else ""
    return f"{', '.join(compared)} of {len(ids)} samples in batches of {size}{left}"


def close(metric: str, expected: float, found: float) -> None:
    """Raises:
    Broken: two numbers differ by more than rounding.
    """
    if math.isnan(expected) and math.isnan(found):
        return
    away = abs(expected - found)
    if not away <= CLOSE * max(1.0, abs(expected)):
        raise Broken(f"{metric} is {found:.6g}, and {expected:.6g} sample by sample", tensor=metric, away=away)


def scores(subject: Subject, logits: Tensor, labels: NDArray[np.generic]) -> dict[str, float]:
    """Metrics of logits [S, C] and labels, each by its formula."""
    if subject.recipe.task.threshold not in (None, 0.5, "tuned"):
        return {}
    return plain_task(subject.dataset.kind).scores(logits.double().cpu().numpy(), labels)
