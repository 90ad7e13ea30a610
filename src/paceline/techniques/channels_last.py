"""Channels last: images and convolution weights with the channels last in memory, as tensor cores read them.

Shapes stay [S, C, H, W]; only the order in memory changes.

Source: PyTorch tutorial "Channels Last Memory Format"; NVIDIA, Convolutional Layers User's Guide (NHWC).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.seams import Batch, Build, Forward

SETTING = "techniques.channels_last"


def apply_channels_last(model: nn.Module, forward: Forward) -> Forward:
    """Put ``model``'s convolution weights channels last, in place; returns a forward pass that does so with images.

    Before an optimizer or anything else holds views of the weights: their strides change.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def with_channels_last(model: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: _channels_last(value) for name, value in batch.inputs.items()}
        return forward(model, replace(batch, inputs=inputs))

    return with_channels_last


def apply(build: Build, setting: bool | Literal["auto"]) -> Build:
    """Channels last for the build's model and images.

    Raises:
        RecipeError: ``setting`` is true and the model has no convolution over images.
    """
    if setting is False:
        return build.carried_out(channels_last="off")
    if has_convolutions(build.model):
        return replace(build, forward=apply_channels_last(build.model, build.forward)).carried_out(channels_last="on")
    reason = "this model has no convolution over images"
    if setting is True:
        raise RecipeError(f"{SETTING} = true", reason, f"--set {SETTING}=auto")
    return build.decided(SETTING, False, reason).carried_out(channels_last=f"off: {reason}")


def has_convolutions(module: nn.Module) -> bool:
    """Over images."""
    return any(parameter.ndim == 4 for parameter in module.parameters())


def _channels_last(value: Tensor) -> Tensor:
    images = value.ndim == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if images else value
