import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from paceline.report.charts import Series, downsample, line_chart, ticks
from paceline.report.curves import smooth


def svg(chart):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, re.S)[0])


def paths(chart, kind):
    return [path.get("d") for path in svg(chart).iter("path") if kind in path.get("class").split()]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (0.84, 0.96, [0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96]),
        (-3, 3, [-3, -2, -1, 0, 1, 2, 3]),
        (0, 5e-5, [0, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round_and_within_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-12, 3e-7, 1, 77, 1e9])
@pytest.mark.parametrize("low", [-0.9, 0, 0.3, 5])
def test_there_are_enough_ticks_at_any_scale(low, scale):
    found = ticks(low * scale, (low + 1) * scale)
    assert 3 <= len(found) <= 8
    assert found == sorted(found)
    assert low * scale <= found[0] + 1e-9 * scale
    assert found[-1] <= (low + 1) * scale * (1 + 1e-9)


def test_ticks_of_steps_are_whole():
    assert ticks(1, 3, whole=True) == [1, 2, 3]


def test_peaks_and_gaps_survive_downsampling():
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[8000] = (8000.0, -5.0)
    points[6000] = (6000.0, math.nan)
    kept = downsample(points, 200)
    assert len(kept) <= 203
    assert points[4321] in kept
    assert points[8000] in kept
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_few_points_stay_as_they_are():
    points = [(1.0, 2.0), (2.0, math.nan)]
    assert downsample(points, 10) == points
    assert downsample([], 10) == []


def test_a_chart_without_values_is_empty():
    assert line_chart("Loss", []) == ""
    assert line_chart("Loss", [Series(name="train", points=[])]) == ""
    assert line_chart("Loss", [Series(name="train", points=[(1, math.nan), (2, math.inf)])]) == ""


def test_a_single_point_is_seen():
    chart = line_chart("Loss", [Series(name="train", points=[(5, 0.25)])])
    titles = [title.text for title in svg(chart).iter("title")]
    assert "train, step 5: 0.2500" in titles
    assert [circle for circle in svg(chart).iter("circle") if circle.get("class").startswith("dot")]


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-12, 1e30])
def test_a_flat_line_lies_within_the_picture(value):
    chart = line_chart("Loss", [Series(name="train", points=[(x, value) for x in range(5)])])
    heights = {float(point.split()[1]) for point in paths(chart, "line")[0][1:].split("L")}
    assert len(heights) == 1
    assert 8 < heights.pop() < 206


def test_a_value_that_is_not_finite_breaks_the_line():
    values = [1, 2, math.nan, 3, 4, math.inf, 5]
    chart = line_chart("Loss", [Series(name="train", points=list(enumerate(values)))])
    assert paths(chart, "line")[0].count("M") == 3
    assert "nan" not in chart.lower()


def test_scales_put_the_ends_at_the_edges():
    chart = line_chart("Loss", [Series(name="train", points=[(10, 0.0), (20, 1.0)])], from_zero=True)
    (first_x, first_y), (last_x, last_y) = (map(float, p.split()) for p in paths(chart, "line")[0][1:].split("L"))
    assert (first_x, last_x) == (52, 468)
    assert first_y == 206, "zero lies on the axis"
    assert 8 <= last_y < 25


def test_charts_share_the_span_they_are_given():
    chart = line_chart("Accuracy", [Series(name="test", points=[(50, 0.5)], look="dots")], span=(0, 100))
    (circle,) = svg(chart).iter("circle")
    assert float(circle.get("cx")) == 260


def test_names_are_escaped():
    evil = "</svg><script>alert(1)</script>\x1b[31m"
    chart = line_chart(evil, [Series(name=evil, points=[(1, 1.0), (2, 2.0)]), Series(name="b", points=[(1, 1.0)])])
    assert "<script" not in chart
    assert "\x1b" not in chart
    assert svg(chart) is not None


def test_a_smoothed_curve_passes_over_values_that_are_not_finite():
    values = np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    assert smooth(values, 3).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert np.isnan(smooth(np.array([np.nan]), 3)).all()
    assert smooth(np.array([]), 3).size == 0
    assert smooth(np.full(100, 2.0), 11).tolist() == [2.0] * 100
