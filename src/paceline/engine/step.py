"""One training step: the file to read first.

A step is ``micro`` for each of its micro-batches, then ``apply_update`` once. Losses are sums divided by the label
count of the *global* batch, so gradients only ever add up, whichever way the batch is cut. One number, the global
gradient norm, decides everything about the update: how much to clip, and whether to make it at all.
Nothing here waits for the device or changes where a tensor lives, so that both can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.contract.spans import span
from paceline.optim.gradients import Gradients
from paceline.optim.scaling import LossScale
from paceline.optim.updates import Updates

Objective = Callable[[Any], tuple[Tensor, Any]]
"""Batch -> (sum of the samples' losses as an fp32 scalar, whatever else the forward pass is to hand back)."""


@dataclass(frozen=True)
class Step:
    """The two functions of a step and what they work on."""

    objective: Objective
    gradients: Gradients
    scale: LossScale
    updates: Updates
    clip_norm: float | None

    def micro(self, batch: Any, denominator: Tensor | float, first: bool, last: bool) -> tuple[Tensor, Any]:
        """Forward and backward of one micro-batch; returns its share of the step's mean loss, and the extra."""
        with span("forward"):
            loss_sum, extra = self.objective(batch)
            loss = loss_sum / denominator
        with span("backward"):
            self.gradients.add(self.scale.up(loss), first=first, last=last)
        return loss.detach(), extra

    def apply_update(self) -> tuple[Tensor, ...]:
        """Clip and update; returns what ``Update`` has, as device scalars."""
        with span("clip"):
            norm = self.scale.down(self.gradients.norm())
            told = self.scale.told(self.gradients)
            finite = norm.isfinite()
            factor = self.scale.down(torch.ones_like(norm))
            if self.clip_norm is not None:
                factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        with span("update"):
            self.updates.apply(self.gradients, factor, finite)
            self.scale.adapt(finite)
        return norm, finite, *told
