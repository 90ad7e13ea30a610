"""Line charts as inline SVG: no script, no font, no request; colours come from the page's style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from paceline.observe.formats import amount, figure, printable

Point = tuple[float, float]

WIDTH, HEIGHT = 480, 232
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 8, 26
DRAWN_POINTS = 600
"""Points kept of a line: a lowest and a highest for every pixel and a half."""
HOVER_POINTS = 48
"""Places along a line that show their value under the pointer."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart. A value that is not finite is a gap.

    ``look``: ``line``; ``faint`` for what lies behind another line; ``dots`` for few, separately measured values.
    ``colour``: 0 to 5, a colour of the style sheet.
    """

    name: str
    points: Sequence[Point]
    look: Literal["line", "faint", "dots"] = "line"
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What runs from left to right: its name, and how its values are written."""

    name: str
    write: Callable[[float], str]


STEPS = Axis(name="step", write=lambda value: f"{value:,.0f}" if value < 1e6 else amount(value))


def line_chart(
    title: str,
    series: Iterable[Series],
    *,
    axis: Axis = STEPS,
    span: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
    from_zero: bool = False,
    write: Callable[[float], str] = figure,
) -> Markup:
    """A ``<figure>`` with the title, a legend with last values, and the chart over steps; empty without any value.

    Args:
        title: shown above, and read out by screen readers.
        series: those without a finite value are left out.
        axis: from left to right, in place of the steps.
        span: first and last step of the axis, so that charts side by side line up; by default the points'.
        marks: steps with a vertical line, such as the ends of epochs.
        from_zero: the values' axis starts at 0, where differences should not look larger than they are.
        write: formats the values.
    """
    shown = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not shown:
        return Markup("")
    points = [point for one in shown for point in one.points if math.isfinite(point[1])]
    x_low, x_high = _domain([x for x, _ in points] + list(span or ()), padding=0)
    y_low, y_high = _domain([y for _, y in points] + [0.0] * from_zero, padding=0.05)
    place = _Place(x_low, x_high, y_low, y_high)
    rule = Markup('<path class="mark" d="M{:.1f} {}V{}"/>')
    parts = [*_axes(place, axis), *(rule.format(place.x(x), TOP, HEIGHT - BOTTOM) for x in marks if x_low < x < x_high)]
    for one in shown:
        parts += _drawn(one, place, write, axis)
    legend = [_key(one, write, title) for one in shown if one.look != "faint" or len(shown) == 1]
    return Markup(
        '<figure class="chart"><figcaption><span class="name">{}</span>{}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{} over {}s">{}</svg></figure>'
    ).format(
        printable(title), Markup("").join(legend), WIDTH, HEIGHT, printable(title), axis.name, Markup("").join(parts)
    )


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """About ``count`` round values from ``low`` to ``high``, 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.75 * rough)
    if whole:
        step = max(float(math.ceil(step)), 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def downsample(points: Sequence[Point], limit: int) -> list[Point]:
    """About ``limit`` of the points, in order: of each stretch the lowest, the highest, and a gap if it has one.

    Unlike a mean or every n-th point, no peak is lost.
    """
    if len(points) <= limit:
        return list(points)
    stretches = max(limit // 2, 1)
    bounds = [index * len(points) // stretches for index in range(stretches + 1)]
    kept: list[Point] = []
    for start, end in itertools.pairwise(bounds):
        stretch = range(start, end)
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        chosen = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])} if finite else set()
        chosen |= set([index for index in stretch if not math.isfinite(points[index][1])][:1])
        kept += [points[index] for index in sorted(chosen)]
    return kept


@dataclass(frozen=True)
class _Place:
    """From values to the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _domain(values: Sequence[float], padding: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    if 0 < low < 0.3 * high and padding:
        low = 0.0  # nearly there
    room = (high - low) * padding
    return (low if low == 0 else low - room), high + room


def _axes(place: _Place, axis: Axis) -> list[Markup]:
    parts = []
    marks = ticks(place.y_low, place.y_high)
    for value in marks:
        y = place.y(value)
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, y, WIDTH - RIGHT))
        parts.append(
            Markup('<text x="{}" y="{:.1f}" class="y">{}</text>').format(LEFT - 7, y + 4, _label(value, marks))
        )
    steps = ticks(place.x_low, place.x_high, count=5, whole=True)
    for value in steps:
        text = Markup('<text x="{:.1f}" y="{}" class="x">{}</text>')
        parts.append(text.format(place.x(value), HEIGHT - 7, axis.write(value)))
    return parts


def _label(value: float, marks: Sequence[float]) -> str:
    largest = max(abs(mark) for mark in marks)
    step = marks[1] - marks[0] if len(marks) > 1 else largest
    if value == 0:
        return "0"
    if largest < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if largest >= 1e4:
        return amount(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals + (abs(round(step, decimals) - step) > 1e-9 * step)}f}"


def _drawn(one: Series, place: _Place, write: Callable[[float], str], axis: Axis) -> list[Markup]:
    points = downsample(one.points, DRAWN_POINTS)
    path, dots = [], []
    for run in _unbroken(points):
        at = [f"{place.x(x):.1f} {place.y(y):.1f}" for x, y in run]
        path.append("M" + "L".join(at))
        if len(run) == 1 and one.look != "dots":
            dots.append(run[0])
    parts = [Markup('<path class="{} c{}" d="{}"/>').format(one.look, one.colour, "".join(path))]
    finite = [point for point in points if math.isfinite(point[1])]
    hover = finite if one.look == "dots" else finite[:: math.ceil(len(finite) / HOVER_POINTS)]
    circle = Markup('<circle class="{} c{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}, {} {}: {}</title></circle>')

    def dot(look: str, point: Point, radius: int) -> Markup:
        at = place.x(point[0]), place.y(point[1])
        said = printable(one.name), axis.name, axis.write(point[0]), write(point[1])
        return circle.format(look, one.colour, *at, radius, *said)

    parts += [dot("dot", point, 2) for point in dots]
    kind, radius = ("dot", 3) if one.look == "dots" else ("hover", 6)
    parts += [dot(kind, point, radius) for point in (hover if one.look != "faint" else ())]
    return parts


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _key(one: Series, write: Callable[[float], str], title: str) -> Markup:
    last = next(y for _, y in reversed(one.points) if math.isfinite(y))
    if one.name.lower() == title.lower():
        return Markup('<span class="key"><b>{}</b></span>').format(write(last))
    key = Markup('<span class="key {} c{}"><i></i>{} <b>{}</b></span>')
    return key.format(one.look, one.colour, printable(one.name), write(last))
