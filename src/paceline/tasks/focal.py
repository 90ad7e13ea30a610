"""Focal loss: what the model is sure of, and right about, hardly counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0, weight: Tensor | None = None) -> Tensor:
    """``(1 - p) ** gamma`` times cross-entropy, p being the probability of the right label.

    Lin et al., Focal Loss for Dense Object Detection, arXiv 1708.02002, equations 4 and 5; ``weight`` is its alpha.

    Args:
        logits: [S, C].
        labels: [S] class indices; or, where each label is decided by itself, [S, C] of 0 and 1.
        gamma: from 0, where it is cross-entropy.
        weight: [C], of the samples of each class; of the second kind of labels, of a label where it is 1.

    Returns:
        One loss a sample, [S], or a label, [S, C]: none of them summed.

    Example:
        >>> loss = focal_loss(logits, labels, gamma=2.0).mean()
    """
    if labels.ndim == logits.ndim:
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        weights = None if weight is None else 1 + (weight - 1) * labels
    else:
        losses = F.cross_entropy(logits, labels, reduction="none")
        weights = None if weight is None else weight[labels]
    # 1 - p without cancellation; above 0, where a power below 1 has no slope
    unsure = -torch.expm1(-losses)
    losses = unsure.clamp(min=torch.finfo(losses.dtype).tiny) ** gamma * losses
    return losses if weights is None else losses * weights
