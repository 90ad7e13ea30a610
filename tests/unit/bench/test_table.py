"""The ladder as lines: what is the fastest, and what cannot be told apart from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.ladder import Ladder
from paceline.bench.rungs import Rung
from paceline.bench.standings import standings
from paceline.bench.table import shown
from tests.unit.bench.test_standings import record

ABOUT: dict[str, Any] = {
    "extent": {"steps": 80, "train_rows": 640, "heldout_rows": 1000, "warm_up": 10},
    "machine": {"cpu_model": "some CPU", "cpu_count": 2, "gpus": []},
    "asked": {"recipe": {"loop": {"batch_size": 8}}},
    "matmul": {"flops_per_second": 4e10, "dtype": "float32"},
}


def told(rates: dict[str, list[float]]) -> str:
    rungs = [Rung(name=name, contender="x", change=f"changes {name}") for name in rates]
    records = [record(rung, at, samples_per_second=rate) for rung in rungs for at, rate in enumerate(rates[rung.name])]
    rungs.append(replace(rungs[0], name="absent"))
    rows = standings(rungs, records, {"absent": ("absent", "pip install it")}, 1000)
    return shown(Ladder(name="n", folder=Path("f"), rows=rows, about=ABOUT))


def test_bars_figures_and_reasons_stand_in_it() -> None:
    text = told({"a": [100, 110, 90], "b": [200, 210, 190]})
    assert "b     ██████████████████  200.0 (190.0..210.0)  2.00 x" in text
    assert "absent\n  absent: pip install it" in text
    assert "Fastest that learns the same: b, changes b." in text
    assert "matrix products here: 40 GFLOP/s in float32" in text
    assert "Not told apart" not in text, "nothing is near it"


def test_one_rung_alone_is_compared_with_nothing() -> None:
    text = told({"a": [100, 110, 90]})
    assert "fastest" not in text.lower()
    assert "Nothing to compare: of the rungs that learn the same, a alone was measured." in text


def test_what_is_as_fast_within_its_spread_is_named() -> None:
    text = told({"a": [100, 190, 90], "b": [200, 210, 180], "c": [150, 160, 170]})
    assert "Not told apart from it: a; their spreads meet." in text
