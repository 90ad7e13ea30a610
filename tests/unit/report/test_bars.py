"""Bars begin at zero, end where their values do, and stay within the picture."""

import xml.etree.ElementTree as ElementTree

import pytest

from paceline.report.bars import RIGHT, Bar, Piece, bar_chart
from paceline.report.charts import WIDTH


def bar(name, *values):
    return Bar(name=name, pieces=[Piece(name=f"{name} {i}", value=v, colour=i) for i, v in enumerate(values)])


def svg(chart):
    return ElementTree.fromstring(chart[chart.index("<svg") : chart.index("</svg>") + 6])


def rects(chart):
    return [{name: float(rect.get(name)) for name in ("x", "y", "width", "height")} for rect in svg(chart).iter("rect")]


def test_pieces_stand_end_to_end_and_bars_share_a_scale():
    chart = bar_chart("Memory", [bar("one", 1.0, 3.0), bar("other", 8.0)], height=20)
    first, second, long = rects(chart)
    assert first["x"] == long["x"], "both begin at zero"
    assert second["x"] == pytest.approx(first["x"] + first["width"], abs=0.05)
    assert second["width"] == pytest.approx(3 * first["width"], abs=0.05)
    assert long["width"] == pytest.approx(2 * (first["width"] + second["width"]), abs=0.05)
    assert long["x"] + long["width"] == pytest.approx(WIDTH - RIGHT, abs=0.05)
    assert first["y"] == second["y"]
    assert long["y"] >= first["y"] + first["height"], "bars lie over one another"
    height = float(svg(chart).get("viewBox").split()[3])
    assert long["y"] + long["height"] < height


def test_the_axis_counts_in_the_unit_and_names_it_once():
    chart = bar_chart("Memory", [bar("b", 8.0 * 2**30)], height=20, unit=2.0**30, unit_name="GiB")
    marks = {text.text: float(text.get("x")) for text in svg(chart).iter("text") if text.get("class") == "x"}
    assert list(marks) == ["0", "2", "4", "6", "8 GiB"]
    (piece,) = rects(chart)
    assert marks["0"] == pytest.approx(piece["x"], abs=0.1)
    assert marks["8 GiB"] == pytest.approx(piece["x"] + piece["width"], abs=0.1)


def test_each_piece_says_what_it_is():
    chart = bar_chart("Memory", [bar("b", 1.0, 2.0)], height=20, write=lambda value: f"{value:.0f} B")
    assert [title.text for title in svg(chart).iter("title")] == ["b 0: 1 B", "b 1: 2 B"]
    assert [rect.get("class") for rect in svg(chart).iter("rect")] == ["p0", "p1"]


@pytest.mark.parametrize("bars", [[], [bar("b")], [bar("b", 0.0)]])
def test_a_chart_without_values_is_empty(bars):
    assert bar_chart("Memory", bars, height=20) == ""


def test_a_long_name_leaves_room_for_the_bars():
    (piece,) = rects(bar_chart("Memory", [bar("x" * 1000, 1.0)], height=20))
    assert piece["width"] > WIDTH / 3


def test_names_are_escaped():
    evil = "</svg><script>alert(1)</script>\x1b[31m"
    chart = bar_chart(evil, [bar(evil, 1.0)], height=20)
    assert "<script" not in chart
    assert "\x1b" not in chart
    assert svg(chart) is not None
