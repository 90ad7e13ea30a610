"""Micro-batches of nothing but filler: what a rank runs where the samples of a step have run out.

Filler is made of real samples, so that nothing in it is out of the ordinary: a row of padding alone would give some
attention kernels a sum over nothing, and not a number times weight 0 is not 0. It is the same each time, so that it
adds one shape.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.seams import Batch


def as_filler(batch: Batch) -> Batch:
    """The batch with every sample's weight 0: its loss is 0, and so is every gradient."""
    # a label that is missing, as those of a test split may be, would stop the loss
    return replace(batch, labels=torch.zeros_like(batch.labels), weights=torch.zeros_like(batch.weights))
