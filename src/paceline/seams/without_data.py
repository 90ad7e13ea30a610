"""Modules on torch's device ``meta``, where tensors have shapes and no data."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn


def without_data(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers have shapes alone, to be passed through and looked at.

    A copy, for a forward pass may keep something of what it is given.

    Raises:
        Exception: whatever a part of the model that cannot be copied raises.
    """
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        empty: Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if trained else empty
    return copy.deepcopy(model, memo)


@torch.no_grad()
def pass_images(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Pass two images through a model ``without_data``, for hooks and modes to look at.

    Two, for batch normalisation in training refuses a single value a channel.

    Args:
        shape: (C, H, W).

    Raises:
        Exception: whatever a model raises that needs data.
    """
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), None)
    model(torch.empty((2, *shape), device="meta", dtype=dtype))
