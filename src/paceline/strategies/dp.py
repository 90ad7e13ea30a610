"""DP: one process, several GPUs, by torch's DataParallel. Slow, and here for completeness.

At every pass each GPU gets a copy of the weights and a piece of the batch, one Python thread a GPU runs the model,
and logits and gradients are gathered on the first GPU. The update is that of one GPU.

Source: torch's documentation of ``torch.nn.DataParallel``, which recommends DistributedDataParallel instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.seams import Batch, Build, Engine, Forward, LayoutKind
from paceline.strategies.alone import OneDevice
from paceline.strategies.strategy import Strategy, Training

SETTING = "parallel.strategy"


def apply_dp(model: nn.Module, forward: Forward, devices: Sequence[torch.device]) -> Forward:
    """``forward`` with each batch split over all ``devices``; for padded batches, cut along their first dimension.

    The model itself stays as it is, so that its weights keep their names.

    Args:
        model: on the first device.
        devices: GPUs.
    """
    spread = nn.DataParallel(model, device_ids=[device.index for device in devices])

    def on_all(model: nn.Module, batch: Batch) -> Tensor:
        return forward(spread, batch)

    return on_all


@final
class OneProcess(Strategy):
    """One process, and all GPUs that it sees."""

    def prepare(self, build: Build) -> Build:
        """The build with its passes on all devices.

        Raises:
            RecipeError: fewer than two devices, or batches that cannot be cut: packed rows.
        """
        count = torch.get_device_module(build.device).device_count()
        if count < 2:
            why = f"it splits a batch over several GPUs, and there is {count or 'none'}"
            raise RecipeError(f"{SETTING} = dp", why, f"--set {SETTING}=auto")
        if build.layout_kind is LayoutKind.PACKED:
            why = "a packed row is one piece, and texts in it are not to be torn"
            raise RecipeError(f"{SETTING} = dp", why, "--set techniques.packing=false")
        devices = [torch.device(build.device.type, index) for index in range(count)]
        forward = apply_dp(build.model, build.forward, devices)
        return replace(build, forward=forward).carried_out(parallel=f"dp: {count} GPUs")

    def engine(self, build: Build, training: Training) -> Engine:
        return OneDevice(self.mesh, self.recipe).engine(build, training)


STRATEGY = OneProcess
