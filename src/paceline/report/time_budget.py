"""Traced windows of a run: the verdict, a bar a rank, and a bar a step of the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from paceline.contract.errors import UserError
from paceline.observe.formats import moment
from paceline.report.bars import Bar, Piece, bar_chart
from paceline.tracing import CATEGORIES, budget, read_facts, read_window, verdict, windows_in
from paceline.tracing.telling import figures, sentences, shown_ranks

COLOURS = dict(zip(CATEGORIES, (7, 1, 2, 6, 8, 3, 4, 5, 11, 0), strict=True))
"""Fills of the style sheet."""

MOST_BARS = 40
"""The most bars in a chart: more could not be told apart."""


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """What the section shows of one window; only title and problem, where its trace cannot be read."""

    title: str
    sentences: tuple[str, ...] = ()
    charts: tuple[Markup, ...] = ()
    pieces: tuple[Piece, ...] = ()
    """The legend: the pieces of a mean step, on the rank that takes longest for its own work."""
    figures: tuple[str, ...] = ()
    problem: str = ""


def time_budgets(folder: Path) -> list[TimeBudget]:
    """What the section shows of each window that was traced in a run folder; one of nsys' is left out, which keeps its
    trace to itself."""
    found = []
    for window in windows_in(folder):
        try:
            if read_facts(window / "rank0.window.json").kind == "kineto":
                found.append(_of_window(window))
        except UserError as error:
            found.append(TimeBudget(title=window.name.replace("-", " "), problem=str(error)))
    return found


def _of_window(folder: Path) -> TimeBudget:
    window = read_window(folder)
    budgets = budget(window)
    found = verdict(window, budgets)
    ranks = shown_ranks(budgets, MOST_BARS)
    slowest = budgets.slowest
    charts = [_chart("A mean step of each rank", {f"rank {rank}": budgets.mean(rank) for rank in ranks}, height=22)]
    if len(budgets.steps) > 1:
        steps = {f"step {one.step:,}": one.seconds for one in budgets.of_rank(slowest)[:MOST_BARS]}
        charts.append(_chart(f"Step by step on rank {slowest}", steps, height=14))
    first, last = window.facts.first_step, window.facts.last_step
    return TimeBudget(
        title=f"step {first:,}" if first == last else f"steps {first:,} to {last:,}",
        sentences=tuple(line.strip() for line in sentences(found)),
        charts=tuple(chart for chart in charts if chart),
        pieces=_pieces(budgets.mean(slowest)),
        figures=tuple(line.strip() for line in figures(found, budgets)),
    )


def _chart(title: str, rows: Mapping[str, Mapping[str, float]], *, height: int) -> Markup:
    bars = [Bar(name=name, pieces=_pieces(seconds)) for name, seconds in rows.items()]
    longest = max(sum(piece.value for piece in bar.pieces) for bar in bars)
    unit, unit_name = (1.0, "s") if longest >= 1 else (1e-3, "ms")
    return bar_chart(title, bars, height=height, unit=unit, unit_name=unit_name, write=moment)


def _pieces(seconds: Mapping[str, float]) -> tuple[Piece, ...]:
    return tuple(
        Piece(name=name, value=seconds[name], colour=COLOURS[name]) for name in CATEGORIES if seconds[name] > 0
    )
