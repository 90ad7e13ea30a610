"""A chart of spots with names, as inline SVG: no script, no font, no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from paceline.observe.formats import figure, printable
from paceline.report.charts import WIDTH, ticks

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 52, 96, 12, 44
LINE = 12.0
"""Height of a name: one that would lie on another is moved down by so much."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One spot. ``colour``: 0 to 13, a fill of the style sheet."""

    name: str
    x: float
    y: float
    colour: int


def scatter_chart(title: str, spots: Sequence[Spot], *, x_name: str, y_name: str) -> Markup:
    """A ``<figure>`` with the title and the spots, each with its name beside it; empty without any.

    Args:
        title: shown above, and read out by screen readers.
        spots: what is shown.
        x_name: what runs to the right, from 0.
        y_name: what runs up, as shares.
    """
    if not spots:
        return Markup("")
    x_high = max(spot.x for spot in spots) or 1.0
    y_low, y_high = min(spot.y for spot in spots), max(spot.y for spot in spots)
    room = max(0.02, 0.1 * (y_high - y_low))
    y_low, y_high = max(0.0, y_low - room), min(1.0, y_high + room)

    def across(value: float) -> float:
        return LEFT + value / x_high * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ticks(y_low, y_high):
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, up(value), WIDTH - RIGHT))
        parts.append(
            Markup('<text x="{}" y="{:.1f}" class="y">{}</text>').format(LEFT - 7, up(value) + 4, f"{value:.1%}")
        )
    for value in ticks(0.0, x_high):
        mark = Markup('<text x="{:.1f}" y="{}" class="x">{}</text>')
        parts.append(mark.format(across(value), HEIGHT - BOTTOM + 16, f"{value:g}"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(Markup('<text x="{:.1f}" y="{}" class="x">{}</text>').format(middle, HEIGHT - 8, printable(x_name)))
    taken: list[tuple[float, float]] = []
    for spot in sorted(spots, key=lambda each: up(each.y)):
        x, y = across(spot.x), up(spot.y)
        at = y + 4
        while any(abs(at - other) < LINE and abs(x - beside) < RIGHT for beside, other in taken):
            at += LINE
        taken.append((x, at))
        told = printable(spot.name), figure(spot.x), figure(spot.y)
        circle = '<circle class="spot" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}: {} s, {}</title></circle>'
        parts.append(Markup(f'<g class="p{{}}">{circle}</g>').format(spot.colour, x, y, *told))
        parts.append(Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(x + 8, at, told[0]))
    return Markup(
        '<figure class="chart"><figcaption><span class="name">{}</span><span class="key">{}</span></figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(printable(title), printable(y_name), WIDTH, HEIGHT, printable(title), Markup("").join(parts))
