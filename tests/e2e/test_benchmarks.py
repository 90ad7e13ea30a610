"""The benchmark runner: its tables and suites by themselves, and the smallest suite as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites import read_book, turns
from benchmarks.tables import render

ROOT = Path(__file__).resolve().parents[2]


def record(contender: str, rate: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "work": "text/batch8",
        "contender": contender,
        "cold": False,
        "round": 0,
        "status": "ok",
        "samples_per_second": rate,
        "machine": {"card": None, "driver": None, "cpu": "some", "cpus": 2, "memory_bytes": 2**34, "python": "3.11.7"},
        "versions": {"torch": "2.11.0"},
        "commit": None,
        **fields,
    }


def cells_of(page: str, contender: str) -> dict[str, str]:
    """A row of the page's table by its column titles."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    titles = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    row = next(line for line in lines if line.startswith(f"| {contender} "))
    return dict(zip(titles, (cell.strip() for cell in row.split("|")[1:-1]), strict=True))


def test_the_table_compares_medians_with_the_best_peer() -> None:
    rates = {"paceline": (300, 200, 100), "slow": (50, 50, 50), "fast": (90, 110, 100)}
    page = render("s", [record(name, rate, round=i) for name, all_ in rates.items() for i, rate in enumerate(all_)])
    assert cells_of(page, "paceline")["samples/s"] == "200 (100..300)", "median and spread"
    assert cells_of(page, "paceline")["x best peer"] == "2.00", "the ratio is to the best peer's median"
    assert cells_of(page, "slow")["x best peer"] == "0.50", "peers are compared too"


def test_cold_runs_have_columns_of_their_own() -> None:
    runs = [
        record("paceline", 10.0, cold=True, first_update_seconds=9.0),
        record("paceline", 20.0, first_update_seconds=4.0),
    ]
    row = cells_of(render("s", runs), "paceline")
    assert row["samples/s"] == "20", "a cold run's rate got into the warm ones"
    assert (row["first update, cold, s"], row["first update, warm, s"]) == ("9.0", "4.0"), "start-up was mixed"
    assert row["n warm (cold)"] == "1 (1)", "wrong number of runs"


def test_what_did_not_work_is_told_under_the_table() -> None:
    page = render(
        "s",
        [
            record("broken", status="failed", error="long\nOutOfMemoryError: no room"),
            record("paceline", 1.0, same_batches=False, num_parameters=10),
            record("peer", 1.0, num_parameters=11),
        ],
    )
    assert "broken, warm 0: failed: OutOfMemoryError: no room" in page, "a failure is not told"
    assert "batches were not those of the workload" in page, "other batches are not told"
    assert "models of different size: 10, 11 parameters" in page, "models of different size are not told"


@pytest.mark.parametrize("suite", read_book().suites)
def test_every_suite_names_what_exists(suite: str) -> None:
    book = read_book()
    found = list(turns(book, suite, rounds=2))
    assert found, "nothing is run"
    for turn in found:
        cell = turn.cell
        if cell.workload:
            recipe = ROOT / "benchmarks" / "recipes" / book.workloads[cell.workload].recipe
            assert recipe.exists(), f"{cell.name}: no recipe {recipe.name}"
        if cell.script:
            assert (ROOT / "benchmarks" / "contenders" / cell.script).exists(), f"{cell.name}: no {cell.script}"
    names = [(turn.cell.name, turn.cold, turn.round) for turn in found]
    assert len(set(names)) == len(names), "two cells of one name: the second would be taken for done"


def test_rounds_take_turns_and_begin_with_another_contender() -> None:
    warm = [t for t in turns(read_book(), "imdb_distilbert", rounds=3, only="batch64") if not t.cold]
    rounds = [[t.cell.contender for t in warm if t.round == number] for number in range(3)]
    assert len(warm) == 9, "a contender is missing in a round"
    assert len({first for first, *_ in rounds}) == 3, "the same contender goes first each time"
    assert len({frozenset(names) for names in rounds}) == 1, "not everybody is in each round"


def speed(folder: Path, *options: str) -> str:
    """The runner in a process of its own; what it printed."""
    command = [sys.executable, "benchmarks/speed.py", "tiny", "--out", str(folder), *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tiny.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_suite_runs_goes_on_and_writes_its_table(tmp_path: Path) -> None:
    speed(tmp_path, "--rounds", "0")
    cold = records_in(tmp_path)
    bad = {f"{r['work']}/{r['contender']}": r.get("error", "")[-500:] for r in cold if r["status"] == "failed"}
    assert not bad, "contenders failed"
    ours = [r for r in cold if r["contender"] == "paceline"]
    assert len(ours) == 2, "paceline did not run on text and on images"
    assert all(r["same_batches"] for r in ours), "paceline trained on other batches than the workload's"
    for work in {r["work"] for r in cold}:
        sizes = {r["num_parameters"] for r in cold if r["work"] == work and r["status"] == "ok"}
        assert len(sizes) == 1, f"{work}: contenders have models of different size: {sizes}"
    alike = ("paceline", "hf_same_order", "tutorial_fp32")  # of the three, what is installed here
    texts = [r for r in cold if "text" in r["work"] and r["contender"] in alike and r["status"] == "ok"]
    assert len(texts) >= 2, "nothing to compare"
    same = {r["tokens"] for r in texts}
    assert len(same) == 1, f"not the same tokens in the window: {same}"
    page = speed(tmp_path, "--rounds", "1", "--only", "tiny_text/*paceline")
    assert len(records_in(tmp_path)) == len(cold) + 1, "what was done is run again, or what was asked for is not run"
    assert page.strip() == (tmp_path / "tiny.md").read_text().strip(), "the printed page is not the written one"
    assert "1 (1)" in cells_of(page, "paceline").values(), "the warm run is not in the table"
    before = len(records_in(tmp_path))
    speed(tmp_path, "--rounds", "1", "--deadline", "0")
    assert len(records_in(tmp_path)) == before, "a cell was started after the deadline"
