"""Label smoothing where every label is decided by itself; of one label a sample, ``cross_entropy`` has its own."""

from __future__ import annotations

from torch import Tensor


def smoothed(labels: Tensor, smoothing: float) -> Tensor:
    """0 and 1 moved towards one half: ``labels * (1 - smoothing) + smoothing / 2``.

    So a label and its absence are two classes, smoothed as ``torch.nn.functional.cross_entropy`` smooths two (Szegedy
    et al., arXiv 1512.00567).

    Args:
        labels: [S, C] of 0 and 1. smoothing: from 0, below 1.

    Example:
        >>> loss = F.binary_cross_entropy_with_logits(logits, smoothed(labels, 0.1))
    """
    return labels * (1 - smoothing) + smoothing / 2 if smoothing else labels
