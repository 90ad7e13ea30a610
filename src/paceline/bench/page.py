"""report.html of a ladder: the chart, time against quality, where the whole job's time goes, memory, claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from paceline._version import __version__
from paceline.bench.claims import answers
from paceline.bench.ladder import Ladder
from paceline.bench.standings import STAGES, Standing
from paceline.bench.table import about
from paceline.observe.formats import duration, share, size
from paceline.report.bars import Bar, Piece, bar_chart
from paceline.report.page import page_of
from paceline.report.scatter import Spot, scatter_chart

COLOURS = dict(zip(STAGES, (0, 1, 3, 4, 6, 2, 5, 10), strict=True))
"""Stage -> its fill in the style sheet."""

PEER, OURS, ASIDE = 10, 6, 0
"""Colours of bars: a peer's, paceline's, and of what learns something else."""

HEIGHT = 16
"""Height of a bar."""


def charts(rows: Sequence[Standing]) -> dict[str, Markup]:
    """The pictures by name; one without a value is left out."""
    measured = [row for row in rows if row.whole]
    found = {
        "rate": bar_chart(
            "Steady training rate, samples a second",
            [_bar(row, row.rate.median) for row in measured if row.rate],
            height=HEIGHT,
            write=lambda value: f"{value:,.1f} samples/s",
        ),
        "whole": bar_chart(
            "The whole job, from the CSV to the tested and saved model",
            [_stacked(row) for row in measured],
            height=HEIGHT,
            unit_name="s",
            write=duration,
        ),
        "quality": scatter_chart(
            "Time against quality",
            [
                Spot(name=row.rung.name, x=_time(row), y=row.quality.median, colour=_colour(row))
                for row in measured
                if row.quality
            ],
            x_name="seconds of the whole job",
            y_name="share of held-out samples that get their label",
        ),
        "memory": bar_chart(
            "Peak memory",
            [_bar(row, peak.median) for row in measured if (peak := row.peak_gpu_bytes or row.peak_host_bytes)],
            height=HEIGHT,
            unit=2.0**30,
            unit_name="GiB",
            write=size,
        ),
    }
    return {name: chart for name, chart in found.items() if chart}


def page(ladder: Ladder) -> str:
    """One HTML file that stands alone."""
    content = {
        "name": ladder.name,
        "about": list(about(ladder)),
        "notices": ladder.notices,
        "charts": charts(ladder.rows),
        "stages": [{"name": name, "colour": colour} for name, colour in COLOURS.items()],
        "rows": list(_rows(ladder.rows)),
        "others": [row for row in ladder.rows if row.state != "measured"],
        "claims": answers(ladder.rows),
        "versions": _versions(ladder.about),
        "version": __version__,
    }
    return page_of("ladder.html", content)


def _colour(row: Standing) -> int:
    if row.verdict in ("different", "by design"):
        return ASIDE
    return OURS if row.rung.contender == "paceline" else PEER


def _bar(row: Standing, value: float) -> Bar:
    return Bar(name=row.rung.name, pieces=[Piece(name=row.rung.name, value=value, colour=_colour(row))])


def _time(row: Standing) -> float:
    """Seconds of the whole job, with warm caches where there is such a cell."""
    found = row.warm or row.whole
    return found.median if found else 0.0


def _stacked(row: Standing) -> Bar:
    pieces = [Piece(name=name, value=seconds, colour=COLOURS[name]) for name, seconds in row.stages.items()]
    return Bar(name=row.rung.name, pieces=pieces)


def _rows(rows: Sequence[Standing]) -> Iterator[dict[str, Any]]:
    first = next((row.rate.median for row in rows if row.rate and row.verdict == "first"), None)
    for row in rows:
        if row.whole is None:
            continue
        peak = row.peak_gpu_bytes or row.peak_host_bytes
        spread = row.rate
        yield {
            "name": row.rung.name,
            "change": row.rung.change,
            "rate": f"{spread.median:,.1f}" if spread else "",
            "spread": f"{spread.low:,.1f} to {spread.high:,.1f}" if spread and spread.n > 1 else "",
            "beside": f"{spread.median / first:.2f}" if spread and first else "",
            "cold": duration(row.cold.median) if row.cold else "",
            "warm": duration(row.warm.median) if row.warm else "",
            "peak": size(peak.median) if peak else "",
            "energy": f"{row.energy_joules.median / 1000:,.1f} kJ" if row.energy_joules else "",
            "quality": share(row.quality.median) if row.quality else "",
            "n": row.n,
            "verdict": "fastest" if row.is_best else row.verdict,
            "told": row.told,
        }


def _versions(told: dict[str, Any]) -> str:
    versions = told["machine"].get("versions") or {}
    shown = [f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name)]
    commit = (told.get("commit") or {}).get("commit")
    return ", ".join([f"paceline {told['paceline']}", *shown, *([f"commit {commit[:12]}"] if commit else [])])
