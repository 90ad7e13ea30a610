"""Which samples each step takes, and which of them each rank: a pure function of a small state. Numpy only.

So resuming needs nothing else, on any number of ranks, and ranks agree without a word: each works out the whole split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError

Ids = NDArray[np.int64]

CLOSE = 1.002
"""The heaviest share over the mean at which a split is even enough: what is left to win is a 500th of a step."""


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
    """This rank's share, cut into forward passes: equally many on all ranks. Where samples run out one is empty (ids
    of length 0), and is run on filler of weight 0, so that ranks that meet within a pass stay in step."""


class ShuffledOrder:
    """Every sample once an epoch, in an order drawn from (seed, epoch); the last batch may be smaller.

    Or as many as there are samples, each drawn by its weight.

    The number of ranks changes nothing about it: they share out each step's samples among themselves.

    Args:
        ids: the samples of the training split.
        micro_batch_size: samples of one rank's forward pass, at most.
        shuffle: False keeps the order of ``ids``.
        drop_last: leave out a last batch that is smaller than the others.
        lengths: tokens of each sample, by its id: what ranks split by; None counts every sample the same, as images.
        weights: [number of samples], adding up to 1: an epoch's samples are drawn by them, with replacement, and are as
            many; None takes each once.
        fewest: samples that a rank gets of a step, where it gets any and the batch has so many for every rank. Of an
            epoch's last batch some may so get none: batch normalisation may have no use for a sample by itself.
    """

    def __init__(
        self,
        ids: Ids,
        *,
        micro_batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        lengths: NDArray[np.int64] | None = None,
        fewest: int = 1,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        self._weights = weights
        self._ids, self._micro, self._lengths, self._fewest = ids, micro_batch_size, lengths, fewest
        self._shuffle, self._drop_last = shuffle, drop_last
        self._permuted = lru_cache(maxsize=2)(self._permute)
        # the next step is looked at while this one runs, and again when its turn comes
        self._split_once = lru_cache(maxsize=2)(self._split)
        self._planned = lru_cache(maxsize=2)(self._plan)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Number of steps in an epoch; 0 when ``drop_last`` leaves nothing."""
        whole, rest = divmod(len(self._ids), batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def plan(self, at: OrderState, rank: int = 0, world_size: int = 1) -> StepPlan:
        """The step that begins at ``at``, as ``rank`` takes part in it.

        One rank cuts the batch as it stands. Several split it by tokens, sample counts equal within one; each rank's
        share is split into its micro-batches in the same way, from the fullest to the emptiest, so that ranks which
        meet within a step have much the same to do there. Samples keep the batch's order within a micro-batch."""
        return self._planned(at, rank, world_size)

    def after(self, at: OrderState) -> OrderState:
        """The place after the step at ``at``."""
        if at.step + 1 < self.steps_per_epoch(at.batch_size):
            return replace(at, step=at.step + 1)
        return replace(at, epoch=at.epoch + 1, step=0)

    def microbatches(self, at: OrderState, steps: int, rank: int = 0, world_size: int = 1) -> Iterator[Ids]:
        """This rank's micro-batches of the next steps, in order."""
        for _ in range(steps):
            yield from self.plan(at, rank, world_size).microbatches
            at = self.after(at)

    def of_all_ranks(self, at: OrderState, world_size: int) -> list[Ids]:
        """The micro-batches of every rank in the step at ``at``, rank by rank: for who tells of the whole step."""
        return [ids for rank in range(world_size) for ids in self._cut(at, rank, world_size)]

    def smallest(self, num_samples: int, world_size: int, batch_size: int | None = None) -> int:
        """Samples of the smallest micro-batch that has any, in a step of ``num_samples``.

        Args:
            batch_size: of the run, where the step is an epoch's last and has fewer.
        """
        if world_size == 1:
            return num_samples % self._micro or self._micro
        served, num_pieces = self._served(num_samples, batch_size or num_samples, world_size)
        shares = {num_samples // served, -(-num_samples // served)} - {0}
        return min(share // self._parts(share, num_pieces) for share in shares)

    def smallest_together(self, num_samples: int, world_size: int, batch_size: int | None = None) -> int:
        """Samples that all ranks together have, at least, of the smallest micro-batch; arguments as ``smallest``'s."""
        if world_size == 1:
            return self.smallest(num_samples, 1)
        served, num_pieces = self._served(num_samples, batch_size or num_samples, world_size)
        share, more = divmod(num_samples, served)
        return (served - more) * (share // num_pieces) + more * ((share + 1) // num_pieces)

    def _plan(self, at: OrderState, rank: int, world_size: int) -> StepPlan:
        return StepPlan(self._samples(at), tuple(self._cut(at, rank, world_size)))

    def _samples(self, at: OrderState) -> Ids:
        order = self._permuted(at.seed, at.epoch)
        return order[at.step * at.batch_size : (at.step + 1) * at.batch_size]

    def _split(self, at: OrderState, world_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The length of each sample of the step, and the rank that gets it."""
        samples = self._samples(at)
        lengths = np.ones_like(samples) if self._lengths is None else self._lengths[samples]
        return lengths, split_evenly(lengths, self._served(len(samples), at.batch_size, world_size)[0])

    def _cut(self, at: OrderState, rank: int, world_size: int) -> list[Ids]:
        """The micro-batches of a rank."""
        samples = self._samples(at)
        if world_size == 1:
            return np.split(samples, range(self._micro, len(samples), self._micro))
        lengths, ranks = self._split_once(at, world_size)
        mine = ranks == rank
        share, sizes = samples[mine], lengths[mine]
        num_pieces = self._served(len(samples), at.batch_size, world_size)[1]
        piece = split_evenly(sizes, self._parts(len(share), num_pieces))
        fullest_first = np.argsort(-np.bincount(piece, sizes, num_pieces), kind="stable")
        return [share[piece == index] for index in fullest_first]

    def _served(self, num_samples: int, batch_size: int, world_size: int) -> tuple[int, int]:
        """How many ranks get samples of a step, and how many micro-batches each of all ranks runs."""
        fewest = min(self._fewest, batch_size // world_size)
        served = min(world_size, max(1, num_samples // fewest)) if fewest > 1 else world_size
        largest_share = -(-num_samples // served)
        return served, -(-largest_share // self._micro)

    def _parts(self, share: int, num_pieces: int) -> int:
        """How many of its micro-batches a rank fills: all, unless a smaller number keeps ``fewest`` together."""
        return max(1, -(-share // self._micro), min(num_pieces, share // self._fewest))

    def _permute(self, seed: int, epoch: int) -> Ids:
        if not self._shuffle:
            return self._ids
        random = np.random.default_rng((seed, epoch))
        if self._weights is None:
            return random.permutation(self._ids)
        return random.choice(self._ids, len(self._ids), p=self._weights)


def split_evenly(lengths: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Samples split into ``parts`` shares, of counts equal within one and of like totals.

    Longest first, in rounds: each share gets one of ``parts`` samples, the lightest share the longest (the LPT rule of
    Graham, Bounds on multiprocessing timing anomalies, 1969, held to equal counts). Where that leaves the heaviest
    share more than ``CLOSE`` above the mean, it exchanges samples with the lightest.

    Tokens alone are counted. Attention costs their square, but texts of a round are alike, so that squares come out
    even too: counting them would make the costliest share of IMDB reviews cheaper by 0.3 % at 8 reviews a share, and by
    nothing from 32 on (DistilBERT's costs on an H200; benchmarks/deal_balance.py).

    Args:
        lengths: [n] tokens of each sample.
        parts: number of shares.

    Returns:
        [n] which share each sample is in, from 0; with fewer samples than shares, some stay empty.
    """
    if parts == 1:
        return np.zeros(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    # plain lists: a round is too short for numpy to pay
    sizes, served, totals = lengths[order].tolist(), [], [0] * parts
    for begin in range(0, len(sizes), parts):
        lightest = sorted(range(parts), key=totals.__getitem__)
        served += lightest
        for part, size in zip(lightest, sizes[begin : begin + parts], strict=False):  # the last round may be short
            totals[part] += size
    shares = np.empty(len(lengths), dtype=np.int64)
    shares[order] = served[: len(lengths)]
    _exchange(shares, lengths, totals)
    return shares


def micro_batch_size_above(size: int, num_samples: int, world_size: int, batch_size: int, *, fewest: int) -> int:
    """The first micro-batch size above ``size`` with which none of a step's micro-batches has fewer than ``fewest``.

    Args:
        num_samples: of the step, at least ``fewest`` for every rank. batch_size: of the run, if the step has fewer.
    """
    none = np.empty(0, np.int64)
    return next(
        micro
        for micro in range(size + 1, num_samples + 1)
        if ShuffledOrder(none, micro_batch_size=micro, fewest=fewest).smallest(num_samples, world_size, batch_size)
        >= fewest
    )


def check_world(num_samples: int, world_size: int) -> None:
    """Refuse a number of ranks that leaves one of them without samples in every step.

    A batch smaller than their number is refused before (``choose``). One that they do not divide evenly is fine: shares
    differ by a sample, and losses are divided by the label count of the whole batch.

    Raises:
        RecipeError: fewer training samples than ranks.
    """
    if num_samples < world_size:
        raise RecipeError(
            f"{world_size} processes, {num_samples} training samples",
            "each process needs a sample of its own",
            f"start {_at_most(num_samples)}, or give more data",
        )


def _at_most(processes: int) -> str:
    return f"{processes} processes or fewer" if processes > 1 else "1 process"


def _exchange(shares: NDArray[np.int64], lengths: NDArray[np.int64], totals: list[int]) -> None:
    """Let the heaviest share and the lightest exchange a sample each, in place, as often as there are shares."""
    for _ in totals:
        heavy, light = totals.index(max(totals)), totals.index(min(totals))
        if totals[heavy] * len(totals) <= CLOSE * sum(totals):
            return
        theirs, others = np.flatnonzero(shares == heavy), np.flatnonzero(shares == light)
        if not len(others):
            return
        gap = totals[heavy] - totals[light]
        moved = np.subtract.outer(lengths[theirs], lengths[others])
        given, taken = divmod(int(np.abs(2 * moved - gap).argmin()), len(others))
        tokens = int(moved[given, taken])
        if not 0 < tokens < gap:  # the two would change places, or come no closer
            return
        shares[[theirs[given], others[taken]]] = light, heavy
        totals[heavy] -= tokens
        totals[light] += tokens
