"""What the records of a rung come to: its figures, and whether it learned what the first rung learned."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.bench.records import CUT_OFF, Record
from paceline.bench.rungs import Rung
from paceline.bench.spread import Spread

STAGES = ("import", "data", "model", "compile", "train", "evaluate", "save", "other")
"""A whole job, in its order."""

POINTS = 8
"""Pieces of a run whose mean losses are compared."""

DEVIATIONS = 3.0
"""How many standard deviations of the first rung's seeds, or standard errors of a mean, are no difference."""

LEAST = 0.02
"""Share of a loss that is no difference, however little the seeds differ."""

OF_ONE_SEED = 0.05
"""Quality that is no difference where the first rung has one cell alone, and so no spread."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A row of the table."""

    rung: Rung
    state: str
    """``measured``, ``failed``, ``hung``, ``rubbish``, ``refused``, ``absent``, ``not here``, ``cannot``, ``dropped``,
    ``cut off`` or ``missing``."""
    why: str = ""
    rate: Spread | None = None
    """Steady training samples a second."""
    whole: Spread | None = None
    """Seconds from the start of the process to its end: from the CSV to the tested and saved model."""
    cold: Spread | None = None
    """The same with empty caches."""
    warm: Spread | None = None
    """With the caches that the first cell left."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of each of ``STAGES``."""
    peak_host_bytes: Spread | None = None
    peak_gpu_bytes: Spread | None = None
    """Reserved by torch's allocator."""
    energy_joules: Spread | None = None
    """What its GPUs took from the start of the process to its end."""
    quality: Spread | None = None
    """Over the seeds of which every measured rung has a cell: medians of other seeds cannot be compared."""
    losses: tuple[float, ...] = ()
    """Mean loss of each of ``POINTS`` pieces, over the cells."""
    verdict: str = ""
    """``first``, ``same``, ``different``, ``by design``; empty without a figure."""
    told: str = ""
    """What differs, and by how much."""
    is_best: bool = False
    """The highest rate among those that learn the same, where there are at least two."""

    @property
    def n(self) -> int:
        """Number of cells measured."""
        return self.whole.n if self.whole else 0


def pieces(losses: Sequence[float], points: int = POINTS) -> tuple[float, ...]:
    """Means of the losses in ``points`` pieces of like length, fewer where there are fewer losses."""
    points = min(points, len(losses))
    bounds = [index * len(losses) // points for index in range(points + 1)] if points else []
    return tuple(statistics.fmean(losses[a:b]) for a, b in itertools.pairwise(bounds))


def compared(rung: Rung, records: Sequence[Record], first: Sequence[Record], heldout_rows: int) -> tuple[str, str]:
    """Whether a rung's cells learned what the first rung's did: ``same`` or ``different``, and what differs.

    Cells of one seed are compared in pairs: the same order, other dropout. A difference counts where it leaves the
    band: three standard deviations of the first rung's seeds, or what the losses of single batches scatter by, or 2 %,
    whichever is the widest. Of the quality, three deviations or two binomial standard errors of the held-out rows; five
    points where the first rung has one cell alone.
    """
    if rung.by_design:
        return "by design", "it learns something else"
    ours = {each["seed"]: each for each in records}
    theirs = {each["seed"]: each for each in first}
    if any(math.isnan(each["quality"]) for each in records):
        return "different", "its quality is NaN"
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[seed], theirs[seed]) for seed in seeds] or [(records[-1], first[-1])]
    if told := _losses_differ(rung, pairs, first):
        return "different", told
    expected = statistics.fmean(each["quality"] for each in first)
    gap = statistics.median(mine["quality"] - their["quality"] for mine, their in pairs)
    band = max(
        DEVIATIONS * _deviation([each["quality"] for each in first]),
        OF_ONE_SEED if len(first) == 1 else 0.0,
        2 * math.sqrt(max(expected * (1 - expected), 0.25 / heldout_rows) / heldout_rows),
    )
    if abs(gap) > band:
        return "different", f"quality {gap:+.1%} beside the first rung, whose band is {band:.1%}"
    return "same", ""


def _losses_differ(rung: Rung, pairs: Sequence[tuple[Record, Record]], first: Sequence[Record]) -> str:
    """The first piece of the run that leaves the band, in words; empty where none does."""
    trajectories = [pieces(each["losses"]) for each in first if each["losses"]]
    points = len(trajectories[0]) if trajectories else 0
    for at in range(points - 1 if rung.own_order else 0, points):
        gaps = [pieces(mine["losses"])[at] - pieces(their["losses"])[at] for mine, their in pairs if mine["losses"]]
        if not gaps:
            return ""
        gap, expected = statistics.median(gaps), statistics.fmean(each[at] for each in trajectories)
        band = max(
            DEVIATIONS * _deviation([each[at] for each in trajectories]),
            DEVIATIONS * _standard_error(first[0]["losses"], at, points),
            LEAST * abs(expected),
        )
        if not abs(gap) <= band:  # also where it is no number
            place = f"piece {at + 1} of {points}"
            return f"loss {gap:+.3f} in {place} of the run; the first rung's band is {band:.3f}"
    return ""


def _standard_error(losses: Sequence[float], at: int, points: int) -> float:
    piece = losses[at * len(losses) // points : (at + 1) * len(losses) // points]
    return _deviation(piece) / math.sqrt(len(piece)) if piece else 0.0


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standings(
    rungs: Sequence[Rung], records: Iterable[Record], states: Mapping[str, tuple[str, str]], heldout_rows: int
) -> list[Standing]:
    """A row a rung, in the ladder's order.

    Args:
        states: of rungs that were not run, a state and why.
        heldout_rows: that the quality is measured on.
    """
    by_rung: dict[str, list[Record]] = {}
    for each in records:
        by_rung.setdefault(each["rung"], []).append(each)
    good = {name: [each for each in some if each["status"] == "ok"] for name, some in by_rung.items()}
    learned = {name for name, some in good.items() if some and not any(math.isnan(each["quality"]) for each in some)}
    base = next((rung for rung in rungs if rung.name in learned and not rung.by_design), None)
    seeds = common_seeds(each for some in good.values() for each in some)
    rows = []
    for rung in rungs:
        mine = good.get(rung.name, [])
        if not mine:
            rows.append(_without_figures(rung, by_rung.get(rung.name, []), states))
            continue
        verdict, told = "first", ""
        if base is None or rung.name != base.name:
            verdict, told = compared(rung, mine, good[base.name] if base else [], heldout_rows)
        why = [states[rung.name][1]] if rung.name in states else []
        rows.append(_measured(rung, mine, seeds, verdict, told, "; ".join(why + _lost(by_rung[rung.name]))))
    rates = [row.rate.median for row in rows if row.rate and row.verdict in ("first", "same")]
    best = max(rates) if len(rates) > 1 else None  # one alone is the fastest of nothing
    return [
        Standing(**{**vars(row), "is_best": True})
        if row.rate and row.rate.median == best and row.verdict in ("first", "same")
        else row
        for row in rows
    ]


def common_seeds(records: Iterable[Record]) -> frozenset[int]:
    """Return the seeds of which every rung of the records, all of them measured, has a cell."""
    seeds: dict[str, set[int]] = {}
    for each in records:
        seeds.setdefault(each["rung"], set()).add(each["seed"])
    return frozenset(set.intersection(*seeds.values())) if seeds else frozenset()


def _lost(records: Sequence[Record]) -> list[str]:
    """What became of the cells of a rung that have no figure, beside others that have one."""
    lost = [each for each in records if each["status"] not in ("ok", CUT_OFF)]
    if not lost:
        return []
    last = lost[-1]
    return [f"{len(lost)} of {len(records)} cells {last['status']}: {last.get('why', '')}".removesuffix(": ")]


def _without_figures(rung: Rung, records: Sequence[Record], states: Mapping[str, tuple[str, str]]) -> Standing:
    if rung.name in states:
        state, why = states[rung.name]
        return Standing(rung=rung, state=state, why=why)
    if records:
        return Standing(rung=rung, state=records[-1]["status"], why=records[-1].get("why", ""))
    return Standing(rung=rung, state="missing", why="not measured yet")


def _measured(
    rung: Rung, records: Sequence[Record], seeds: frozenset[int], verdict: str, told: str, why: str
) -> Standing:
    alike = [each for each in records if each["seed"] in seeds] or records
    trajectories = [pieces(each["losses"]) for each in records if each["losses"]]
    return Standing(
        rung=rung,
        state="measured",
        why=why,
        rate=Spread.of(records, "samples_per_second"),
        whole=Spread.of(records, "whole_seconds"),
        cold=Spread.of([each for each in records if each["cold"]], "whole_seconds"),
        warm=Spread.of([each for each in records if not each["cold"]], "whole_seconds"),
        stages={
            name: statistics.median(each["stages"].get(name, 0.0) for each in records)
            for name in STAGES
            if any(each["stages"].get(name) for each in records)
        },
        peak_host_bytes=Spread.of(records, "peak_host_bytes"),
        peak_gpu_bytes=Spread.of(records, "peak_reserved_bytes"),
        energy_joules=Spread.of(records, "energy_joules"),
        quality=Spread.of(alike, "quality"),
        losses=tuple(statistics.fmean(point) for point in zip(*trajectories, strict=True)) if trajectories else (),
        verdict=verdict,
        told=told,
    )
