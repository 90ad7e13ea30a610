"""Bar charts as inline SVG: no script, no font, no request; colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from paceline.observe.formats import figure, printable
from paceline.report.charts import WIDTH, ticks

RIGHT, TOP, AXIS = 16, 4, 24
LETTER = 7.0
"""Width of a letter, about, as it is on a narrow page: names stand left of the bars."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a bar, not negative. ``colour``: 0 to 11, a fill of the style sheet."""

    name: str
    value: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Pieces end to end, from zero."""

    name: str
    pieces: Sequence[Piece]


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    *,
    height: int,
    unit: float = 1.0,
    unit_name: str = "",
    write: Callable[[float], str] = figure,
) -> Markup:
    """A ``<figure>`` with the title and horizontal bars below one another; empty without any value.

    Args:
        title: shown above, and read out by screen readers.
        bars: from top to bottom.
        height: of a bar, in units of the picture, which is ``WIDTH`` of them wide.
        unit: the axis counts in these.
        unit_name: what they are.
        write: formats the values.
    """
    longest = max((sum(piece.value for piece in bar.pieces) for bar in bars), default=0.0)
    if not longest > 0:
        return Markup("")
    left = min(12 + LETTER * max(len(bar.name) for bar in bars), WIDTH / 2)
    scale, gap = (WIDTH - left - RIGHT) / longest, max(6, height // 4)
    bottom = TOP + len(bars) * (height + gap)
    parts = _axis(left, bottom, scale * unit, longest / unit, unit_name)
    for index, bar in enumerate(bars):
        parts += _drawn(bar, left, TOP + index * (height + gap), height, scale, write)
    return Markup(
        '<figure class="chart"><figcaption><span class="name">{}</span></figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(printable(title), WIDTH, bottom + AXIS, printable(title), Markup("").join(parts))


def _axis(left: float, bottom: float, scale: float, longest: float, unit_name: str) -> list[Markup]:
    parts = []
    line = Markup('<path class="grid" d="M{:.1f} {}V{}"/>')
    label = Markup('<text x="{:.1f}" y="{}" class="x">{}</text>')
    marks = ticks(0.0, longest)
    for mark in marks:
        x = left + mark * scale
        name = f"{mark:g} {unit_name}".strip() if mark == marks[-1] else f"{mark:g}"
        parts += [line.format(x, TOP, bottom), label.format(x, bottom + 15, name)]
    return parts


def _drawn(bar: Bar, left: float, top: float, height: int, scale: float, write: Callable[[float], str]) -> list[Markup]:
    middle = top + height / 2 + 4
    parts = [Markup('<text x="{:.1f}" y="{:.1f}" class="y">{}</text>').format(left - 7, middle, printable(bar.name))]
    piece_of = Markup('<rect class="p{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}: {}</title></rect>')
    x = left
    for piece in bar.pieces:
        width = piece.value * scale
        shown = printable(piece.name), write(piece.value)
        parts.append(piece_of.format(piece.colour, x, top, width, height, *shown))
        x += width
    return parts
