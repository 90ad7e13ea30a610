"""mixup and cutmix: each training image is mixed with another one of its step, and so are their losses.

The formulas are torchvision's (``transforms.v2.MixUp`` and ``CutMix``): one share and one box a step, and an image's
partner is the one before it in the batch. Here that is the global batch, and what is drawn follows from seed and step
alone, so that neither ranks nor micro-batches change it.

Shapes: S samples, C channels, H height, W width.
Source: Zhang et al., mixup, ICLR 2018, arXiv:1710.09412; Yun et al., CutMix, ICCV 2019, arXiv:1905.04899.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.recipe.parts import AugmentPart
from paceline.seams import Batch, Ids, Mix, Mixed


def draw(part: AugmentPart, seed: int, step: int, height: int, width: int) -> Mix:
    """How the images of a step are mixed; where both are asked for, each has every second step.

    Args:
        part: ``mixup`` and ``cutmix`` are the alphas of the Beta distributions that shares come from; 0: not that one.
        step: the run's updates before it.
        height: of the images, in pixels.
        width: of the images, in pixels.
    """
    generator = np.random.default_rng((seed, step, 0, 0, 3))  # another stream than dropout's and augmentation's
    cuts = part.cutmix > 0 and (part.mixup == 0 or generator.random() < 0.5)
    alpha = part.cutmix if cuts else part.mixup
    share = float(generator.beta(alpha, alpha))
    if not cuts:
        return Mix(share)
    row, column = int(generator.integers(height)), int(generator.integers(width))
    half = 0.5 * math.sqrt(1 - share)
    tall, wide = int(half * height), int(half * width)
    top, bottom = max(row - tall, 0), min(row + tall, height)
    left, right = max(column - wide, 0), min(column + wide, width)
    return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def mixed(images: Tensor, others: Tensor, mix: Mix) -> Tensor:
    """[S, C, H, W]: the images, each mixed with the one at its place in ``others``."""
    if mix.box is None:
        return images * mix.share + others * (1 - mix.share)
    top, bottom, left, right = mix.box
    found = images.clone()
    found[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return found


def mixed_batch(batch: Batch, other: Batch, mix: Mix) -> Batch:
    """A micro-batch mixed with that of its partners."""
    inputs = {name: mixed(images, other.inputs[name], mix) for name, images in batch.inputs.items()}
    # a kernel writes it: nothing is copied from the host, which would wait
    share = torch.full((), mix.share, device=batch.weights.device)
    return replace(batch, inputs=inputs, mixed=Mixed(other.labels, share))


def partners(samples: Ids, microbatches: Sequence[Ids]) -> tuple[Ids, ...]:
    """Each sample's partner: the one before it in the global batch; the first sample's is the last."""
    order = np.argsort(samples)
    return tuple(samples[order[np.searchsorted(samples, ids, sorter=order)] - 1] for ids in microbatches)
