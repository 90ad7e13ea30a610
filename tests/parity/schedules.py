"""Schedules of other libraries, read off step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def rates_of(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """The rate at each step of a scheduler over an optimizer whose rate is 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for step in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if step + 1 < steps:  # one cycle is over then, and says so
            scheduler.step()
    return found
