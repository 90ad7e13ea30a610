"""A way of splitting a run that paceline does not have: gradients go round a ring of ranks, by send and recv alone.

It is slow, and shows what a new strategy takes: this room, and an entry in the catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.flat import Flat
from paceline.optim.gradients import AllReduce, Put
from paceline.optim.updates import build_updates
from paceline.recipe.entries import TechniqueEntry
from paceline.recipe.techniques import STRATEGY as SETTING
from paceline.seams import Build, Engine, World
from paceline.strategies.strategy import Strategy, Training, torch_engine

ENTRY = TechniqueEntry(
    "ring",
    "Every process keeps the model, and gradients go round a ring.",
    "up to rounding",
    choice=SETTING,
    room="tests.strategies.ring",
)


@final
class RingAllReduce(AllReduce):
    """Each rank's gradients pass every other rank, which adds all of them up in the order of ranks."""

    under_way = False

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Flat, world: World) -> None:
        self._parameters, self._flat, self._world = parameters, flat, world

    def backward(self, loss: Tensor, put: Put) -> None:
        put(self._flat.views, torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def finish(self) -> None:
        rank, size = self._world.rank, self._world.size
        for buffer in self._flat.buffers:
            pieces = {rank: buffer.clone()}
            for hop in range(size - 1):
                sent = dist.isend(pieces[(rank - hop) % size], (rank + 1) % size)
                pieces[(rank - hop - 1) % size] = arriving = torch.empty_like(buffer)
                dist.recv(arriving, (rank - 1) % size)
                sent.wait()
            buffer.copy_(torch.stack([pieces[origin] for origin in range(size)]).sum(0))


@final
class Ring(Strategy):
    def engine(self, build: Build, training: Training) -> Engine:
        world, part = self.mesh.data, training.recipe.optimizer
        world.broadcast_([*build.model.parameters(), *build.model.buffers()])
        sums = partial(RingAllReduce, world=world)
        updates, gradients = build_updates(training.groups, part, training.rates, build.device, (), sums)
        return torch_engine(build, training, updates, gradients, self.mesh)


STRATEGY = Ring
