"""Fully connected: a convolution that puts out one pixel, as the matrix product over the pixels it sees that it is.

A ResNet made for large images ends, on images of 32 pixels, in convolutions of 3 x 3 whose input is one pixel: eight
of nine weights meet nothing but padding. A convolution kernel multiplies by all of them, and so do both its gradients;
here only those that meet a pixel are read, and the others' gradients are zeros. The weights stay as they are: names,
optimizer and checkpoints do not notice.

Shapes: N samples, C channels in, K channels out, H x W pixels in, R x S weights a channel.
Source: the equivalence of fully connected layers and convolutions, Long et al., Fully Convolutional Networks for
Semantic Segmentation, CVPR 2015, section 3.1, the other way round.
"""

from __future__ import annotations

import contextlib
import types
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.seams import Build
from paceline.seams.without_data import pass_images, without_data

SETTING = "techniques.fully_connected"


def apply_fully_connected(model: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """Have convolutions of ``model`` that put out one pixel compute a matrix product, in place.

    Those that leave weights or pixels out: weights that meet nothing but padding, pixels that a stride passes over.
    Given images of another size, the same layers convolve as before. Left alone are convolutions in groups, those that
    pad with something else than zeros, and classes of somebody's own.

    Args:
        shape: (C, H, W) of the images.

    Returns:
        The layers' names.

    Raises:
        Exception: whatever a model raises that cannot be copied, or passed through without data.
    """
    found: dict[str, None] = {}

    def look(name: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _seen(layer, given[0] if given else named["input"]):
            found[name] = None

    trial = without_data(model)
    for name, layer in trial.named_modules():
        if _is_plain(layer):
            layer.register_forward_pre_hook(partial(look, name), with_kwargs=True)
    pass_images(trial, shape)
    for name in found:
        # on the instance, so that the class and every other model of it are left alone
        layer = model.get_submodule(name)
        layer.forward = types.MethodType(_forward, layer)
    return list(found)


def apply(build: Build, setting: bool | Literal["auto"], shape: tuple[int, int, int] | None) -> Build:
    """Matrix products in place of those of the build's convolutions that put out one pixel.

    Args:
        shape: (H, W, C) of the images; None: the data are texts.

    Raises:
        RecipeError: ``setting`` is true and there are none.
    """
    if setting is False or (setting == "auto" and shape is None):
        return build
    names: list[str] = []
    if shape is not None:
        height, width, channels = shape
        # somebody's model may need data to be passed through, and says so in ways of its own
        with contextlib.suppress(Exception):
            names = apply_fully_connected(build.model, (channels, height, width))
    if not names:
        why = "no convolution is known to put out a single pixel, of images of this size"
        if setting is True:
            raise RecipeError(f"{SETTING} = true", why, f"--set {SETTING}=auto")
        return build.decided(SETTING, False, why)
    layers = f"{len(names)} convolution{'' if len(names) == 1 else 's'}"
    reason = f"{layers} put{'s' if len(names) == 1 else ''} out a single pixel, and need not read what does not meet it"
    build = build.carried_out(fully_connected=layers)
    return build.decided(SETTING, True, reason) if setting == "auto" else build


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and "forward" not in vars(module)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


Extent = tuple[slice, slice]
"""Along one dimension: the weights that meet a pixel, and the pixels that they meet."""


def _seen(layer: nn.Module, images: Tensor) -> tuple[Extent, Extent] | None:
    """What makes up the only pixel that ``layer`` makes of [N, C, H, W]; None where it makes more, or all is read."""
    if not isinstance(layer, nn.Conv2d) or images.ndim != 4:
        return None
    down, across = (
        _extent(images.shape[2 + i], layer.kernel_size[i], layer.stride[i], int(layer.padding[i]), layer.dilation[i])
        for i in range(2)
    )
    if down is None or across is None:
        return None
    whole = ((slice(0, layer.kernel_size[i]), slice(0, images.shape[2 + i], layer.dilation[i])) for i in range(2))
    return None if (down, across) == tuple(whole) else (down, across)


def _extent(pixels: int, weights: int, stride: int, padding: int, dilation: int) -> Extent | None:
    if (pixels + 2 * padding - dilation * (weights - 1) - 1) // stride != 0:
        return None
    met = [at for at in range(weights) if 0 <= at * dilation - padding < pixels]
    if not met:
        return None
    first, last = (at * dilation - padding for at in (met[0], met[-1]))
    return slice(met[0], met[-1] + 1), slice(first, last + 1, dilation)


def _forward(self: nn.Conv2d, input: Tensor) -> Tensor:  # named as nn.Conv2d's
    seen = _seen(self, input)
    if seen is None:
        return nn.Conv2d.forward(self, input)
    (rows, tall), (columns, wide) = seen
    # permuted before they are cut: gradients then come in the order in memory that channels-last weights are kept in
    weights = self.weight.permute(0, 2, 3, 1)[:, rows, columns]
    pixels = input.permute(0, 2, 3, 1)[:, tall, wide]
    return F.linear(pixels.flatten(1), weights.flatten(1), self.bias)[:, :, None, None]
