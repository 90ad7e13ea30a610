"""One training step: the file to read first.

A step is ``micro`` for each of its micro-batches, then ``apply_update`` once. Losses are sums divided by the label
count of the *global* batch, so gradients only ever add up, whichever way the batch is cut. One number, the global
gradient norm, decides everything about the update: how much to clip, and whether to make it at all.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.engine.gradients import Gradients
from paceline.engine.scaling import LossScale
from paceline.engine.updates import Updates

Objective = Callable[[Any], tuple[Tensor, Any]]
"""Batch -> (sum of the samples' losses as an fp32 scalar, whatever else the forward pass is to hand back)."""


def micro(
    objective: Objective, gradients: Gradients, scale: LossScale, batch: Any, denominator: float, last: bool
) -> tuple[Tensor, Any]:
    """Forward and backward of one micro-batch; returns its share of the step's mean loss, and the extra."""
    with gradients.backward(last):
        loss_sum, extra = objective(batch)
        loss = loss_sum / denominator
        scale.up(loss).backward()
    return loss.detach(), extra


def apply_update(
    gradients: Gradients, scale: LossScale, updates: Updates, clip_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Clip, update, forget; returns the gradient norm and whether the update was made, as device scalars."""
    norm = scale.down(gradients.norm())
    finite = norm.isfinite()
    factor = scale.down(torch.ones_like(norm))
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    updates.apply(gradients, factor, finite)
    scale.adapt(finite)
    gradients.zero()
    return norm, finite
