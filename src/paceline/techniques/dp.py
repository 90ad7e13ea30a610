"""DP: one process, several cards, by torch's DataParallel. Slow, and here for completeness.

At every pass each card gets a copy of the weights and a piece of the batch, one Python thread a card runs the model,
and logits and gradients are gathered on the first card. The update is that of one card.

Source: torch's documentation of ``torch.nn.DataParallel``, which recommends DistributedDataParallel instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.errors import RecipeError
from paceline.seams import Batch, Build, Forward

SETTING = "parallel.strategy"


def apply_dp(model: nn.Module, forward: Forward, devices: Sequence[torch.device]) -> Forward:
    """``forward`` with each batch dealt to all ``devices``; for padded batches, cut along their first dimension.

    The model itself stays as it is, so that its weights keep their names.

    Args:
        model: on the first device.
        devices: cards.
    """
    spread = nn.DataParallel(model, device_ids=[device.index for device in devices])

    def on_all(model: nn.Module, batch: Batch) -> Tensor:
        return forward(spread, batch)

    return on_all


def apply(build: Build, devices: Sequence[torch.device]) -> Build:
    """The build with its passes on all ``devices``.

    Raises:
        RecipeError: fewer than two devices, or batches that cannot be cut: packed rows.
    """
    if len(devices) < 2:
        why = f"it deals a batch to several cards, and there is {len(devices) or 'none'}"
        raise RecipeError(f"{SETTING} = dp", why, f"--set {SETTING}=auto")
    if build.path.get("layout") == "packed":
        why = "a packed row is one piece, and texts in it are not to be torn"
        raise RecipeError(f"{SETTING} = dp", why, "--set techniques.packing=false")
    forward = apply_dp(build.model, build.forward, devices)
    return replace(build, forward=forward, path={**build.path, "parallel": f"dp: {len(devices)} cards"})
