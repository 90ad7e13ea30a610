"""Where each step's seconds went, on every rank; ``cut.py`` says how a moment is told from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from paceline.tracing.cut import CATEGORIES, EXPOSED, Cut, self_seconds
from paceline.tracing.kinds import kind_of
from paceline.tracing.places import OUTSIDE, PLACES, STEP
from paceline.tracing.window import RankWindow, Window

NUM_TOP = 12

FEW = 3
"""Steps from which on a window can do without its first."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time budget of one step on one rank; all in seconds, and as ``Cut`` has them."""

    rank: int
    step: int
    wall: float
    seconds: Mapping[str, float]
    """By category, each of ``CATEGORIES``; they add up to ``wall``."""
    gaps: Mapping[str, float]
    host: Mapping[str, float]
    communication: float
    reducing: float
    longest_exposed: float
    compiling: float
    fusible: float
    kinds: Mapping[str, float]
    added: float
    """Host gaps of passes and updates that the run replays, and only the window launches kernel by kernel."""

    @property
    def own(self) -> float:
        """What does not depend on other ranks: a rank that waits for others has little of its own."""
        return self.wall - self.seconds[EXPOSED]


@dataclass(frozen=True, kw_only=True)
class Top:
    """A kernel, or an operator on a CPU, with its seconds over the whole trace."""

    name: str
    kind: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The time budgets of all steps and ranks of a window."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    each: tuple[Budget, ...]
    """Rank by rank, each in the order of the steps."""
    top: tuple[Top, ...]
    """The first rank's, those with the most seconds first."""

    @property
    def settled(self) -> tuple[int, ...]:
        """The steps that means are of: all but the first, where there are ``FEW``.

        The first pays for the window's opening: the device was waited for and has to be given work again, and what the
        profiler does for the first time takes longer.
        """
        return self.steps[1:] if len(self.steps) >= FEW else self.steps

    def of_rank(self, rank: int) -> tuple[Budget, ...]:
        """Step by step."""
        return tuple(budget for budget in self.each if budget.rank == rank)

    def of_step(self, step: int) -> tuple[Budget, ...]:
        """Rank by rank."""
        return tuple(budget for budget in self.each if budget.step == step)

    def mean(self, rank: int) -> dict[str, float]:
        """Seconds of each category in a mean step of a rank."""
        own = [budget for budget in self.of_rank(rank) if budget.step in self.settled]
        return {name: sum(budget.seconds[name] for budget in own) / len(own) for name in CATEGORIES}

    def own_seconds(self, rank: int) -> float:
        """Seconds of a mean step of a rank that do not depend on other ranks."""
        own = [budget.own for budget in self.of_rank(rank) if budget.step in self.settled]
        return sum(own) / len(own)

    @property
    def slowest(self) -> int:
        """The rank that takes longest for its own work: the others wait for it."""
        return max(self.ranks, key=self.own_seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a mean step as it is in the run, without what the window adds; of the ranks, the longest
        counts."""
        walls = [max(budget.wall - budget.added for budget in self.of_step(step)) for step in self.settled]
        return sum(walls) / len(walls)


def budget(window: Window) -> Budgets:
    """The budgets of every step and rank of a window."""
    facts = window.facts
    return Budgets(
        steps=tuple(range(facts.first_step, facts.last_step + 1)),
        ranks=tuple(rank.facts.rank for rank in window.ranks),
        each=tuple(budget for rank in window.ranks for budget in _of_rank(rank)),
        top=_top(window.ranks[0]),
    )


def _of_rank(rank: RankWindow) -> Iterator[Budget]:
    steps = range(rank.facts.first_step, rank.facts.last_step + 1)
    cut = Cut(rank.trace, steps, on_gpu=rank.facts.on_gpu)
    parts = [index for index, place in enumerate(PLACES) if place not in (STEP, OUTSIDE)]
    added = np.maximum(cut.gaps[:, parts].sum(axis=1) - cut.compiling, 0.0) * (rank.facts.graphs == "launched")
    for index, step in enumerate(steps):
        yield Budget(
            rank=rank.facts.rank,
            step=step,
            wall=float(cut.bounds[index + 1] - cut.bounds[index]),
            seconds=dict(zip(CATEGORIES, cut.seconds[index].tolist(), strict=True)),
            gaps=dict(zip(PLACES, cut.gaps[index].tolist(), strict=True)),
            host=dict(zip(PLACES, cut.host[index].tolist(), strict=True)),
            communication=float(cut.communication[index]),
            reducing=float(cut.reducing[index]),
            longest_exposed=float(cut.longest_exposed[index]),
            compiling=float(cut.compiling[index]),
            fusible=float(cut.fusible[index]),
            kinds={kind: float(spent[index]) for kind, spent in cut.kinds.items()},
            added=float(added[index]),
        )


def _top(rank: RankWindow) -> tuple[Top, ...]:
    trace = rank.trace
    if rank.facts.on_gpu:
        names, seconds = trace.work.name, trace.work.end - trace.work.begin
    else:
        names, seconds = trace.operators.name, self_seconds(trace.operators)
    spent = np.bincount(names, weights=seconds, minlength=len(trace.names))
    longest = np.argsort(-spent, kind="stable")[:NUM_TOP]
    return tuple(
        Top(name=trace.names[place], kind=kind_of(trace.names[place]), seconds=float(spent[place]))
        for place in longest.tolist()
        if spent[place] > 0
    )
