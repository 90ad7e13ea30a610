"""A whitening first convolution: its filters are the main directions of patches of training images, and stay.

What such a layer puts out is uncorrelated and of variance 1 over the training images. Each direction is there twice,
with either sign, so that a ReLU behind it loses neither half.

Shapes: N images, C channels, H height, W width, K patches, D = C * kernel height * kernel width, O filters.
Source: Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024, arXiv:2404.00498, section 3.2, after Page, How to
train your ResNet 8, 2019.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from paceline.contract.errors import ModelError

SETTING: Final = "model.whitening"
MOST_IMAGES: Final = 2000
"""So many images are looked at: they have enough patches for a few hundred numbers."""
SMALLEST: Final = 5e-4
"""Added to each variance: directions that hardly vary are noise, and are not blown up."""


def apply_whitening(model: nn.Module, images: Tensor | None, channels: int) -> str:
    """Give the first convolution of ``model`` whitening filters, in place, and freeze them. A bias becomes 0, and is
    trained.

    Args:
        images: fp32 [N, C, H, W], normalised as in training, on the convolution's device; None: the filters are only
            frozen, for a plan that looks at no number.
        channels: of the images.

    Returns:
        The layer's name.

    Raises:
        ModelError: there is no such layer, it is grouped, or it has more filters than twice the directions.

    Example:
        >>> apply_whitening(model, images, channels=3)
    """
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.in_channels == channels)
    name, layer = next(found, ("", None))
    what, leave = f"{SETTING} = true", "leave it out"
    if layer is None:
        raise ModelError(what, f"{type(model).__name__} has no convolution over images of {channels} channels", leave)
    directions = layer.weight[0].numel()
    if layer.groups != 1:
        raise ModelError(what, f"{name} sees each group of channels by itself", leave)
    if layer.out_channels > 2 * directions:
        why = f"{name} has {layer.out_channels} filters, and its patches {directions} directions, each with two signs"
        raise ModelError(what, why, f"give it {2 * directions} filters at most, or {leave}")
    with torch.no_grad():
        if images is not None:
            layer.weight.copy_(whitening_filters(images, layer))
            if layer.bias is not None:
                layer.bias.zero_()
    layer.weight.requires_grad_(False)
    return name


def whitening_filters(images: Tensor, layer: nn.Conv2d) -> Tensor:
    """fp32 [O, C, kernel height, kernel width]: directions of the most variance first, each with both signs in turn."""
    size = layer.weight.shape[2:]
    dim = layer.weight[0].numel()
    total, square, patches = (torch.zeros(n, dtype=torch.float64, device=images.device) for n in (dim, dim * dim, 1))
    square = square.view(dim, dim)
    for some in images[:MOST_IMAGES].split(64):
        columns = nn.functional.unfold(some, size, dilation=layer.dilation).movedim(1, 2).reshape(-1, dim)
        total += columns.sum(0, dtype=torch.float64)
        square += (columns.T @ columns).double()
        patches += len(columns)
    mean = total / patches
    variances, vectors = torch.linalg.eigh(square / patches - torch.outer(mean, mean))
    scaled = (vectors / (variances.clamp(min=0) + SMALLEST).sqrt()).T.flip(0)
    # a direction has no sign of its own: its largest number is positive, on every machine
    scaled = scaled * scaled.gather(1, scaled.abs().argmax(1, keepdim=True)).sign()
    both = torch.stack([scaled, -scaled], 1).flatten(0, 1)
    return both[: layer.out_channels].reshape(layer.weight.shape).float()
