"""What is made of what a measured process leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import cells
from paceline.bench.cells import Bench, Cell, measure
from paceline.bench.process import Outcome
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


@pytest.mark.parametrize(
    ("log", "full"),
    [
        ("OSError: [Errno 28] No space left on device: 'kernel'", True),
        ("OSError: [Errno 122] Disk quota exceeded", True),
        ("paceline: /runs/a: no room for a checkpoint\n  why: 9 bytes needed, 1 bytes free", True),
        ("RuntimeError: unable to write to file </torch_7_1_0>: No space left on device (28)", False),
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9 bytes\nNo space left on device", False),
        ("RuntimeError: CUDA error", False),
    ],
)
def test_a_full_disk_is_known_by_its_words_and_shared_memory_is_none(log: str, full: bool, tmp_path: Path) -> None:
    assert bool(cells._no_room(Outcome("failed", 1.0, (), log, 1), tmp_path)) is full
    assert not cells._no_room(Outcome("timeout", 1.0, (), log, 1), tmp_path), "it is the time that ran out"
