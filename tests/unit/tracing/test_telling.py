"""What a person reads of a window."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.tracing import CATEGORIES, budget, read_window, told, verdict
from tests.unit.tracing.simulated import ADAM, MILLI, Workload, write
from tests.unit.tracing.test_verdict import PADDED, PLANTED, TINY

MOST_LINES, MOST_COLUMNS = 25, 120


def text_of(folder: Path, load: Workload) -> str:
    window = read_window(write(folder, load))
    budgets = budget(window)
    return told(verdict(window, budgets), budgets)


@pytest.mark.parametrize("load", [each[1] for each in PLANTED], ids=[each[0] for each in PLANTED])
def test_a_verdict_fits_a_console_and_begins_with_what_matters(load: Workload, tmp_path: Path) -> None:
    lines = text_of(tmp_path, replace(load, world_size=8)).splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_COLUMNS
    assert lines[0].startswith("bound by ")


def test_padding_reads_so(tmp_path: Path) -> None:
    text = text_of(tmp_path, PADDED)
    for line in (
        "bound by padding: 80% of the positions that are computed are padding (81%)",
        "  32,770 tokens in 163,840 positions; forward and backward take 25.2 ms of a step",
        "  --set techniques.packing=true is predicted to win back 20.8 ms of a step, 81%",
        "steps 92 to 100, a mean one",
        "  backward                      16.8 ms   65%  ████████████████████▉",
        "45% of the peak's floating-point operations (MFU); 55% of a step at the GPU's roofline",
    ):
        assert line in text, text


def test_a_clean_run_says_so_first(tmp_path: Path) -> None:
    text = text_of(tmp_path, Workload())
    assert text.startswith("no bottleneck: the GPU computes 100% of the 25.8 ms of a step\n")
    assert "--set" not in text
    assert "data wait" not in text, "what takes next to nothing is left out"


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    load = Workload(world_size=6, slowness=lambda rank, step: 1.5 if rank == 4 else 1 + rank / 100)
    text = text_of(tmp_path, load)
    heading = next(line for line in text.splitlines() if "rank 0" in line)
    assert re.findall(r"rank (\d)", heading) == ["0", "3", "4", "5"]
    assert text.startswith("bound by straggler: the others wait")
    assert "no setting wins it back" in text


def test_what_only_the_window_has_is_told(tmp_path: Path) -> None:
    text = text_of(tmp_path, replace(TINY, facts={"graphs": "launched"}))
    assert re.search(r"^1\.\d\d ms of the host gap are the window's own: the run replays graphs", text, re.M)


def test_nothing_in_a_trace_is_obeyed(tmp_path: Path) -> None:
    folder = write(tmp_path, Workload(facts={"recompiles": [{"step": 92, "reason": "\x1b[2J"}]}, update=300 * MILLI))
    path = folder / "rank0.trace.json.gz"
    evil = gzip.decompress(path.read_bytes()).replace(ADAM.encode(), rb"_adam\u001b[31m\u202e")
    path.write_bytes(gzip.compress(evil))
    window = read_window(folder)
    budgets = budget(window)
    text = told(verdict(window, budgets), budgets)
    assert "_adam\\x1b" in text
    assert not set(text) & {"\x1b", "\u202e"}


def test_all_categories_have_a_line(tmp_path: Path) -> None:
    window = read_window(write(tmp_path, Workload()))
    found = budget(window)
    full = replace(found, each=tuple(replace(one, seconds=dict.fromkeys(CATEGORIES, 0.01)) for one in found.each))
    text = told(verdict(window, full), full)
    assert all(f"  {name} " in text for name in CATEGORIES)
    assert len(text.splitlines()) <= MOST_LINES
