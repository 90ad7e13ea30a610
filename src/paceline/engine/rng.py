"""Random numbers that depend on where the run is, not on what ran before.

Dropout of every micro-batch is seeded from (seed, step, micro-batch, rank). So evaluation, a dry run or a resume
cannot disturb it, and no generator state needs saving.
"""

from __future__ import annotations

import numpy as np


def micro_batch_seed(seed: int, step: int, micro_batch: int, rank: int = 0) -> int:
    """The torch seed of one forward pass; ``step`` counts the run's updates from 0."""
    return int(np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(1, np.uint64)[0])


def augmentation_seed(seed: int, step: int, micro_batch: int, rank: int = 0) -> int:
    """The seed of one micro-batch's random augmentation: another stream than its dropout."""
    return int(np.random.SeedSequence((seed, step, micro_batch, rank, 1)).generate_state(1, np.uint64)[0])
