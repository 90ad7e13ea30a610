"""How likely each sample is to be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sampling_weights(labels: NDArray[Any]) -> NDArray[np.float64]:
    """Weights [n] that add up to 1, by which samples of all classes are drawn equally often.

    Args:
        labels: [n] class indices, of the samples that are drawn from.

    Example:
        >>> sampler = torch.utils.data.WeightedRandomSampler(sampling_weights(labels), len(labels))
    """
    counts = np.bincount(labels)
    weights: NDArray[np.float64] = 1.0 / (counts[labels] * np.count_nonzero(counts))
    return weights
