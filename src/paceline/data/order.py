"""Which samples each step takes: a pure function of a small state, so that resuming needs nothing else. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """A place in the stream of steps."""

    seed: int
    epoch: int
    step: int
    """Steps of this epoch already taken."""
    batch_size: int
    """Samples a step, over all ranks."""


@dataclass(frozen=True)
class StepPlan:
    """The samples of one step."""

    samples: Ids
    """The global batch, in order."""
    microbatches: tuple[Ids, ...]
    """This rank's share, cut into forward passes."""


class ShuffledOrder:
    """Every sample once an epoch, in an order drawn from (seed, epoch); the last batch may be smaller.

    Args:
        ids: the samples of the training split.
        micro_batch_size: samples a forward pass.
        shuffle: False keeps the order of ``ids``.
        drop_last: leave out a last batch that is smaller than the others.
    """

    def __init__(self, ids: Ids, *, micro_batch_size: int, shuffle: bool = True, drop_last: bool = False) -> None:
        self._ids, self._micro = ids, micro_batch_size
        self._shuffle, self._drop_last = shuffle, drop_last
        self._permuted = lru_cache(maxsize=2)(self._permute)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Number of steps in an epoch; 0 when ``drop_last`` leaves nothing."""
        whole, rest = divmod(len(self._ids), batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def plan(self, at: OrderState) -> StepPlan:
        """The step that begins at ``at``."""
        order = self._permuted(at.seed, at.epoch)
        samples = order[at.step * at.batch_size : (at.step + 1) * at.batch_size]
        cuts = range(self._micro, len(samples), self._micro)
        return StepPlan(samples, tuple(np.split(samples, cuts)))

    def after(self, at: OrderState) -> OrderState:
        """The place after the step at ``at``."""
        if at.step + 1 < self.steps_per_epoch(at.batch_size):
            return replace(at, step=at.step + 1)
        return replace(at, epoch=at.epoch + 1, step=0)

    def _permute(self, seed: int, epoch: int) -> Ids:
        if not self._shuffle:
            return self._ids
        return np.random.default_rng((seed, epoch)).permutation(self._ids)
