"""The ladder as plain lines: bars, figures, and what was not measured with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.bench.claims import answers
from paceline.bench.ladder import Ladder
from paceline.bench.spread import Spread
from paceline.bench.standings import Standing
from paceline.observe.formats import columns, duration, printable, share, size

BAR = 18
"""Letters of the longest bar."""

MARKS = {"different": "different", "by design": "by design", "same": "", "first": ""}

HEADINGS = ("rung", "", "samples/s", "beside", "cold", "warm", "memory", "quality", "n", "")


def shown(ladder: Ladder) -> str:
    """Everything, as it is printed at the end."""
    lines = [*about(ladder), "", *rows_shown(ladder.rows), ""]
    lines += list(_not_measured(ladder.rows))
    lines += list(_claims(ladder.rows))
    lines += [f"Note: {notice}." for notice in ladder.notices]
    alike = [row for row in ladder.rows if row.rate and row.verdict in ("first", "same")]
    best = next((row for row in ladder.rows if row.is_best), None)
    if len(alike) == 1:
        lines.append(f"Nothing to compare: of the rungs that learn the same, {alike[0].rung.name} alone was measured.")
    if best and best.rate:
        lines.append(f"Fastest that learns the same: {best.rung.name}, {best.rung.change}.")
        if close := _close(best, best.rate, ladder.rows):
            lines.append(f"Not told apart from it: {', '.join(close)}; their spreads meet.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _close(best: Standing, rate: Spread, rows: Sequence[Standing]) -> list[str]:
    """Rungs that learn the same, and whose fastest cell was as fast as the best rung's slowest."""
    same = [row for row in rows if row.rate and row.verdict in ("first", "same") and row is not best]
    return [row.rung.name for row in same if row.rate and row.rate.high >= rate.low]


def about(ladder: Ladder) -> Iterator[str]:
    """What was done, and on what."""
    told: dict[str, Any] = ladder.about
    extent, machine = told["extent"], told["machine"]
    gpus = [gpu["name"] for gpu in machine.get("gpus") or ()]
    place = (
        f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.get('cpu_model') or 'a CPU'}, {machine['cpu_count']} CPUs"
    )
    yield f"{printable(ladder.name)} on {printable(place)}"
    yield (
        f"{extent['steps']:,} steps of {told['asked']['recipe']['loop']['batch_size']}, {extent['train_rows']:,} rows;"
        f" tested on {extent['heldout_rows']:,}; the rate is that of the steps after {extent['warm_up']}"
    )
    if told.get("matmul"):
        product = told["matmul"]
        yield f"matrix products here: {product['flops_per_second'] / 1e9:,.0f} GFLOP/s in {product['dtype']}"


def rows_shown(rows: Sequence[Standing]) -> Iterator[str]:
    """The measured rungs, a line each."""
    measured = [row for row in rows if row.whole]
    highest = max((row.rate.median for row in measured if row.rate), default=0.0)
    first = next((row.rate.median for row in measured if row.rate and row.verdict == "first"), None)
    yield from columns([HEADINGS, *(_cells(row, highest, first) for row in measured)], left=(0, 1, 9))


def _cells(row: Standing, highest: float, first: float | None) -> tuple[str, ...]:
    speed = row.rate.median if row.rate else 0.0
    bar = "█" * max(1, round(BAR * speed / highest)) if speed else ""
    peak = row.peak_gpu_bytes or row.peak_host_bytes
    return (
        row.rung.name,
        bar,
        _rates(row.rate),
        f"{speed / first:.2f} x" if speed and first else "",
        duration(row.cold.median) if row.cold else "",
        duration(row.warm.median) if row.warm else "",
        size(peak.median) if peak else "",
        share(row.quality.median) if row.quality else "",
        str(row.n),
        "fastest" if row.is_best else MARKS.get(row.verdict, ""),
    )


def _rates(found: Spread | None) -> str:
    if found is None:
        return ""
    middle = f"{found.median:,.1f}"
    return middle if found.n == 1 else f"{middle} ({found.low:,.1f}..{found.high:,.1f})"


def _not_measured(rows: Sequence[Standing]) -> Iterator[str]:
    """Reasons, each with the rungs that have it."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.state != "measured" or row.why:
            told = f"{row.state}: {row.why}" if row.state != "measured" else row.why
            reasons.setdefault(printable(told), []).append(row.rung.name)
        if row.verdict == "different":
            reasons.setdefault(f"different: {row.told}", []).append(row.rung.name)
    for reason, names in reasons.items():
        yield f"{', '.join(names)}\n  {reason}"
    if reasons:
        yield ""


def _claims(rows: Sequence[Standing]) -> Iterator[str]:
    told = [answer for answer in answers(rows) if answer.verdict != "not measured"]
    if told:
        yield "What the tutorials say, and what was measured here"
        width = max(len(answer.claim) for answer in told)
        yield from (f"  {answer.claim:<{width}}  {answer.measured}: {answer.verdict}" for answer in told)
        yield ""
