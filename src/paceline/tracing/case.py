"""What every bound is judged by: the steps that count, and of each the rank that the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from paceline.recipe.rules import is_refused
from paceline.tracing.budgets import FEW, Budget, Budgets
from paceline.tracing.cut import CATEGORIES, EXPOSED, GAP
from paceline.tracing.places import OUTSIDE, STEP
from paceline.tracing.window import Window, WindowFacts

WORTH = 0.10
"""Share of a step from which on something is called its bound. Less lies within what a window of ten steps differs by
from the next one, and within what the profiler itself costs; and nobody would change a run for it."""

LATE, OFTEN = 0.05, 0.8
"""A rank is a straggler from this share of a step on, if it is the last one in so many of the steps; ranks that take
turns at being last are none, however far apart. With fewer steps than ``FEW`` it may be chance: ``WORTH`` counts."""

SETTINGS = (
    *("techniques.packing", "techniques.capture", "techniques.compile", "techniques.fusion", "techniques.precision"),
    *("data.resident", "parallel.reduce_dtype", "loop.micro_batch_size"),
)
"""Those that a verdict may name; it names one only where the window says what it is."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One setting of a recipe and the value that wins back what a bound takes."""

    setting: str
    """One of ``SETTINGS``."""
    value: bool | int | str

    @property
    def text(self) -> str:
        """As ``--set`` takes it."""
        return f"{self.setting}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


@dataclass(frozen=True, kw_only=True)
class Late:
    """A rank that the others wait for in nearly every step."""

    rank: int
    seconds: float
    """That it takes in a step beyond the slowest of the others."""
    own: float
    """Its own seconds a step."""
    others: float
    """The largest own seconds of the others."""
    where: str
    """The category in which it differs most from the others; of a host gap, the host's place in it."""
    is_gap: bool
    more: float
    """Seconds a step by which it differs there."""


@final
class Case:
    """A window as a verdict sees it; seconds are those of a mean step.

    Args:
        window: what was traced.
        budgets: its budgets.
    """

    def __init__(self, window: Window, budgets: Budgets) -> None:
        self.facts: WindowFacts = window.facts
        self.all_facts = tuple(rank.facts for rank in window.ranks)
        self._budgets = budgets
        self.steps = budgets.settled
        self.late = self._find_late()

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step as it is in the run."""
        return self.traced_seconds - self.added

    @cached_property
    def traced_seconds(self) -> float:
        """Seconds of a step in the window."""
        return self._mean_of(self.wall)

    @cached_property
    def added(self) -> float:
        """Seconds of a step in the window that the run does not have."""
        return self.mean(lambda budget: budget.added)

    def wall(self, step: int) -> float:
        """Seconds of one step; of the ranks, the one with the longest counts."""
        return max(budget.wall for budget in self._budgets.of_step(step))

    def mean(self, of: Callable[[Budget], float]) -> float:
        """The mean over steps of what ``of`` says of the rank that the others wait for. A rank that is always late is
        left out: that is a bound of its own."""
        return self._mean_of(lambda step: of(self._critical[step]))

    def category(self, name: str) -> float:
        """Seconds of a category, in the same sense; communication without the wait for others: it is the shortest."""
        if name == EXPOSED:
            return self.communication(lambda budget: budget.seconds[EXPOSED])
        return self.mean(lambda budget: budget.seconds[name])

    def communication(self, of: Callable[[Budget], float]) -> float:
        """The mean over steps of what ``of`` says of the rank that waits least: what the links take."""
        return self._mean_of(lambda step: of(min(self._budgets.of_step(step), key=lambda each: each.seconds[EXPOSED])))

    @cached_property
    def gap(self) -> float:
        """Seconds in which the device has nothing to do for the host's sake, in the run as it is, compiling apart."""
        gaps = self.mean(lambda budget: sum(budget.gaps.values()) - (budget.compiling if self.facts.on_gpu else 0.0))
        return max(gaps - self.added, 0.0)

    @cached_property
    def gap_beside_parts(self) -> float:
        """That part of the gap for which the host was in none of a step's parts."""
        return self.mean(lambda budget: budget.gaps[STEP] + budget.gaps[OUTSIDE])

    @cached_property
    def host_beside_passes(self) -> float:
        """Seconds of the host for all that a replay does not do for it."""
        beside = ("data wait", "copy", "communicate", STEP, OUTSIDE)
        return self.mean(lambda budget: sum(budget.host[place] for place in beside))

    def kind(self, *names: str) -> float:
        """Seconds of kernels of these kinds."""
        return self.mean(lambda budget: sum(budget.kinds.get(name, 0.0) for name in names))

    def flops(self) -> float | None:
        """Floating-point operations of a rank in a mean step; None where one is not known."""
        steps = set(self.steps)
        known = [step.flops for facts in self.all_facts for step in facts.steps if step.step in steps]
        if not known or None in known:
            return None
        return sum(flops or 0.0 for flops in known) / len(known)

    def switch(self, setting: str, value: bool | int | str) -> Switch | None:
        """To this value, if the run has another one and its recipe would take it."""
        settings: Mapping[str, Any] = self.facts.settings
        if settings.get(setting, value) == value or is_refused(settings, setting, value):
            return None
        return Switch(setting=setting, value=value)

    @cached_property
    def _critical(self) -> dict[int, Budget]:
        """Step -> the budget of the rank that takes longest for its own work; the late one is left out."""
        late = self.late.rank if self.late else None
        return {
            step: max((one for one in self._budgets.of_step(step) if one.rank != late), key=lambda one: one.own)
            for step in self.steps
        }

    def _mean_of(self, of: Callable[[int], float]) -> float:
        return sum(map(of, self.steps)) / len(self.steps)

    def _find_late(self) -> Late | None:
        if len(self._budgets.ranks) < 2:
            return None
        own = {
            step: {one.rank: one.own - one.compiling - one.added for one in self._budgets.of_step(step)}
            for step in self.steps
        }
        rank, times = Counter(max(ranks, key=ranks.__getitem__) for ranks in own.values()).most_common(1)[0]
        more = self._mean_of(lambda step: own[step][rank] - max(own[step][each] for each in own[step] if each != rank))
        least = (LATE if len(self.steps) >= FEW else WORTH) * self.traced_seconds
        if times < OFTEN * len(self.steps) or more < least:
            return None
        others = self._mean_of(lambda step: max(own[step][each] for each in own[step] if each != rank))
        means = {each: self._pieces(each) for each in self._budgets.ranks}
        differences = {
            piece: means[rank][piece] - max(means[each][piece] for each in means if each != rank)
            for piece in means[rank]
        }
        place, is_gap = max(differences, key=differences.__getitem__)
        return Late(
            rank=rank,
            seconds=more,
            own=others + more,
            others=others,
            where=place,
            is_gap=is_gap,
            more=differences[place, is_gap],
        )

    def _pieces(self, rank: int) -> dict[tuple[str, bool], float]:
        """Mean seconds of a rank's own categories, and of its host gap by the host's place (True)."""
        pieces: dict[tuple[str, bool], float] = {}
        for budget in self._budgets.of_rank(rank):
            if budget.step in self.steps:
                own = {(name, False): budget.seconds[name] for name in CATEGORIES if name not in (EXPOSED, GAP)}
                for piece, seconds in (own | {(place, True): gap for place, gap in budget.gaps.items()}).items():
                    pieces[piece] = pieces.get(piece, 0.0) + seconds / len(self.steps)
        return pieces
