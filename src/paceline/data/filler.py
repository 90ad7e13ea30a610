"""Weights of samples, and micro-batches of nothing but filler: what a rank runs where a step's samples have run out.

Filler is made of real samples, so that nothing in it is out of the ordinary: a row of padding alone would give some
attention kernels a sum over nothing, and not a number times weight 0 is not 0. It is the same each time, so that it
adds one shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from paceline.seams import Batch


@final
class Ones:
    """Weights of real samples.

    As many samples get the same tensor as before: nothing is launched for it, and a captured step need not copy it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Tensor] = {}

    def __call__(self, samples: int) -> Tensor:
        """fp32 [samples], not to be changed."""
        if samples not in self._known:
            self._known[samples] = torch.ones(samples, device=self._device)
        return self._known[samples]


def as_filler(batch: Batch) -> Batch:
    """The batch with every sample's weight 0: its loss is 0, and so is every gradient."""
    # a label that is missing, as those of a test split may be, would stop the loss
    return replace(batch, labels=torch.zeros_like(batch.labels), weights=torch.zeros_like(batch.weights))
