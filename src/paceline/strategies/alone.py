"""One device that has the whole model and every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from paceline.optim.updates import build_updates
from paceline.seams import Build, Engine
from paceline.strategies.strategy import Strategy, Training, torch_engine


@final
class OneDevice(Strategy):
    """No other rank to share with."""

    def engine(self, build: Build, training: Training) -> Engine:
        part = training.recipe.optimizer
        updates, gradients = build_updates(
            training.groups, part, training.rates, build.device, untrained(build, training)
        )
        return torch_engine(build, training, updates, gradients, self.mesh)


def untrained(build: Build, training: Training) -> Sequence[Tensor]:
    """The model's weights and buffers that no group trains."""
    trained = {parameter for group in training.groups for parameter in group.parameters}
    return [tensor for tensor in (*build.model.parameters(), *build.model.buffers()) if tensor not in trained]
