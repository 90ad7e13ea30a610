"""Random numbers that depend on where the run is, not on what ran before.

Dropout of every micro-batch is seeded from (seed, step, micro-batch, rank). So evaluation, a dry run or a resume
cannot disturb it, and no generator state needs saving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def micro_batch_seed(seed: int, step: int, micro_batch: int, rank: int = 0) -> int:
    """The torch seed of one forward pass; ``step`` counts the run's updates from 0."""
    return int(np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(1, np.uint64)[0])


def generators(device: torch.device) -> Sequence[torch.Generator]:
    """torch's own generators that a step with its weights on ``device`` draws from.

    ``torch.manual_seed`` would do for all devices, but it notes a stack trace for each kind of device that this machine
    has not, at every call: 0.35 ms a step, in a list that grows.
    """
    if device.type == "cuda":
        torch.cuda.init()
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    # weights that are offloaded to the CPU are computed with on the GPU
    index = torch.cuda.current_device() if device.index is None or device.type != "cuda" else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def augmentation_seed(seed: int, step: int, micro_batch: int, rank: int = 0, *, of_partners: bool = False) -> int:
    """The seed of one micro-batch's random augmentation: another stream than its dropout.

    Args:
        of_partners: of the images that its own are mixed with.
    """
    stream = 2 if of_partners else 1
    return int(np.random.SeedSequence((seed, step, micro_batch, rank, stream)).generate_state(1, np.uint64)[0])
