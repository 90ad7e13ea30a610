"""DDP: every rank keeps the whole model, takes a share of each batch, and gradients are summed in buckets.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from functools import partial
from typing import final

from torch import nn

from paceline.optim.gradients import MakeAllReduce
from paceline.optim.updates import build_updates
from paceline.seams import Build, Engine, World
from paceline.strategies.alone import untrained
from paceline.strategies.ddp.buckets import BUCKET_BYTES, BucketAllReduce, Reduction
from paceline.strategies.strategy import Strategy, Training, torch_engine
from paceline.techniques.precision import summed_in


@final
class DataParallel(Strategy):
    """Every rank a whole model."""

    def engine(self, build: Build, training: Training) -> Engine:
        world, model, recipe = self.mesh.data, build.model, training.recipe
        # ranks may have started from different seeds
        world.broadcast_([*model.parameters(), *model.buffers()])
        updates, gradients = build_updates(
            training.groups,
            recipe.optimizer,
            training.rates,
            build.device,
            untrained(build, training),
            all_reduce_of(build, training, world),
        )
        return torch_engine(build, training, updates, gradients, self.mesh)


STRATEGY = DataParallel


def all_reduce_of(build: Build, training: Training, world: World) -> MakeAllReduce:
    """What sums the gradients of the build's model over ranks, in buckets as the recipe has them."""
    model, part = build.model, training.recipe.parallel
    size = part.bucket_mib or training.bucket_mib
    reduction = Reduction(
        world,
        tuple(model.parameters()),
        cuts=_first_of_blocks(build),
        bucket_bytes=BUCKET_BYTES if size is None else size * 2**20,
        dtype=summed_in(part, model),
    )
    return partial(BucketAllReduce, reduction=reduction)


def _first_of_blocks(build: Build) -> list[nn.Parameter]:
    """The first parameter of the first block, where there are blocks.

    The all-reduce of all blocks can then begin while the embeddings before them, which are most of a small model's
    weights, are still differentiated: by kernels that leave a GPU's multiprocessors to the sum, as matrix products do
    not."""
    return [parameter for block in build.blocks[:1] for parameter in (*block.parameters(),)[:1]]
