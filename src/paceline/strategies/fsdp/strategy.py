"""FSDP: every rank keeps a shard of each weight, its gradient and its states; see ``shard`` for how.

Passes that ranks capture and replay together have micro-batches of one shape. Nobody is asked for it: each rank works
out the whole split of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from paceline.contract.errors import RecipeError
from paceline.engine.torch_engine import SEVERAL
from paceline.optim.state import Splitting
from paceline.seams import Build, Engine, Ids, Layout, StepInput, World
from paceline.strategies.fsdp.gradients import build_sharded_updates
from paceline.strategies.fsdp.shard import abandon, apply_fsdp, collected, load_whole, mesh_of
from paceline.strategies.strategy import Strategy, Training, torch_engine
from paceline.techniques.precision import summed_in


def with_widths(given: StepInput, pieces: Sequence[Ids], layout: Layout) -> StepInput:
    """The step's input, each micro-batch as wide as the widest rank's, where the layout can do that and counts agree.

    Ranks split by tokens, so that the widest is seldom wider by more than a few hundredths.

    Args:
        given: one rank's.
        pieces: the micro-batches of every rank, rank by rank.
    """
    each = len(given.microbatches)
    widths: list[int | None] = []
    for index in range(each):
        sizes = [layout.size(ids) for ids in pieces[index::each]]
        narrow, wide = (choose(size.slots for size in sizes) for choose in (min, max))
        if len({size.samples for size in sizes}) > 1 or not sizes[0].samples or wide - narrow > layout.widens_by:
            return replace(given, widths=(), same_shapes=False)
        widths.append(wide if layout.widens_by else None)
    return replace(given, widths=tuple(widths))


@final
class Sharded(Strategy):
    """Every rank a shard; ranks meet in every block of every pass."""

    def why_not_retried(self) -> str:
        return "ranks that share weights meet in every block, and one that is out of memory leaves the others waiting"

    def prepare(self, build: Build) -> Build:
        """Shard the build's model over the ranks; the first rank's weights are everybody's.

        Raises:
            RecipeError: a weight that torch cannot shard, or shards that do not fit the number of ranks.
        """
        model, part, world = build.model, self.recipe.parallel, self.mesh.data
        size = part.shard_size or world.size
        if world.size % size:
            raise RecipeError(
                f"parallel.shard_size = {size}",
                f"there are {world.size} ranks, which are no whole number of groups of {size}",
                "a divisor of the number of ranks, or leave it out",
            )
        # shards of different models would go unnoticed
        world.broadcast_([*model.parameters(), *model.buffers()])
        mesh, reduce_dtype = mesh_of(build.device, world.size, size), summed_in(part, model)
        apply_fsdp(model, build.blocks, mesh, reduce_dtype=reduce_dtype, offload=part.offload != "none")
        copies = f", {world.size // size} copies" if size < world.size else ""
        where = ", kept in main memory" if part.offload != "none" else ""
        told = build.carried_out(parallel=f"fsdp: {size} shards{copies}{where}")
        return replace(told, meets_in_forward=True)

    def engine(self, build: Build, training: Training) -> Engine:
        world = self.mesh.data
        updates, gradients = build_sharded_updates(
            build.model, training.groups, training.recipe.optimizer, training.rates, build.device, world
        )
        return torch_engine(
            build,
            training,
            updates,
            gradients,
            self.mesh,
            # ranks meet inside what is captured: they keep a graph together, or none does
            agree=world.any,
            not_captured=SEVERAL if self._takes_several else "",
            splitting=_Shards(world),
            abandon=abandon,
        )

    def share(self, given: StepInput, of_all_ranks: Callable[[], Sequence[Ids]], layout: Layout) -> StepInput:
        captures = self.recipe.techniques.capture is True and not self._takes_several
        return with_widths(given, of_all_ranks(), layout) if captures else given

    @property
    def _takes_several(self) -> bool:
        """Whether a step has several micro-batches on a rank."""
        loop = self.recipe.loop
        return (loop.micro_batch_size or loop.batch_size) * self.mesh.data.size < loop.batch_size


STRATEGY = Sharded


@final
class _Shards(Splitting):
    def __init__(self, world: World) -> None:
        self._world = world

    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return collected(tensors, self._world)

    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        load_whole(current, saved)
