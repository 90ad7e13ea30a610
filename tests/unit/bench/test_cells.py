"""What is made of what a measured process leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import cells
from paceline.bench.cells import Bench, Cell, measure
from paceline.bench.rungs import OURS, Rung
from paceline.bench.work import Extent

LEAVES = """
import os, pathlib, sys

folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir()
(folder / "summary.json").write_text(os.environ["SUMMARY"])
step = '{"kind": "step", "seconds": 1.0, "samples": 8, "loss": 1.0}'
(folder / "metrics.jsonl").write_text((step + chr(10)) * 4)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    "summary",
    ['{"sec', "[]", "{}", "null", json.dumps({"seconds": {}, "final": {}}), json.dumps({"seconds": {}, "final": None})],
)
def test_a_summary_that_is_not_whole_is_told_of_its_cell(
    summary: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline.py").write_text(LEAVES)  # python -m paceline finds it
    monkeypatch.setattr(cells, "SOURCE", tmp_path)
    monkeypatch.setenv("SUMMARY", summary)
    monkeypatch.setenv("CODE", str(code))
    extent = Extent(steps=4, train_rows=32, heldout_rows=8, warm_up=1)
    bench = Bench(folder=tmp_path, extent=extent, job={}, recipe=tmp_path / "r", batch_size=8, gpus=0, seed=0)
    ours = Cell(Rung(name="ours", contender=OURS, change="", settings={}), 0)
    found = measure(ours, bench, limit_seconds=60, out_of_time=False)
    told = (
        ("failed", "exit code 1, without a word") if code else ("rubbish", "it ended well, and left no whole summary")
    )
    assert (found["status"], found["why"]) == told
