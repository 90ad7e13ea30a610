"""The report's section about traced windows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.report.build import build_report
from paceline.report.time_budget import COLOURS, MOST_BARS, time_budgets
from paceline.tracing import CATEGORIES
from tests.unit.report.test_report import EVIL, Page, assert_inert
from tests.unit.report.test_report import write as write_records
from tests.unit.tracing.simulated import SETTINGS, Workload, write

TWO = Workload(world_size=2, padding=0.8)


def sections(folder: Path, records: Any) -> tuple[str, list[str]]:
    write_records(folder, records.run())
    html = build_report(folder).read_text(encoding="utf-8")
    assert_inert(html)
    return html, re.findall(r"<section>\s*<h2>Where a step.*?</section>", html, re.S)


def test_a_traced_run_shows_its_verdict_and_a_bar_a_rank(records: Any, tmp_path: Path) -> None:
    write(tmp_path / "trace" / "steps-91-100", TWO)
    html, found = sections(tmp_path, records)
    assert len(found) == 1
    text = re.sub(r"\s+", " ", Page(found[0]).text)
    for fact in (
        "time goes: steps 91 to 100",
        "bound by padding: 80% of the positions that are computed are padding (80%)",
        "--set techniques.packing=true is predicted to win back 20.8 ms of a step, 80%",
        "forward 8.40 ms backward 16.8 ms exposed communication 0.30 ms clip + update 0.55 ms",
        "by kind: matmul 67%",
    ):
        assert fact in text, f"{fact}\n{text}"
    assert len(re.findall("<figure", found[0])) == 2
    named = re.findall(r'class="y">([^<]+)<', found[0])
    assert named == ["rank 0", "rank 1", *(f"step {step}" for step in range(91, 101))]
    colours = set(re.findall(r'class="p(\d+)"', found[0]))
    assert all(f".p{colour} {{" in html for colour in colours), "a piece has no colour"


def test_a_bar_is_as_long_as_a_step(tmp_path: Path) -> None:
    write(tmp_path / "trace" / "steps-91-100", TWO)
    (found,) = time_budgets(tmp_path)
    lengths = {piece.name: piece.value for piece in found.pieces}
    assert lengths["backward"] == pytest.approx(2 * lengths["forward"], rel=0.01)
    assert sum(lengths.values()) == pytest.approx(26.1e-3, rel=0.01)


def test_each_category_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def test_every_window_has_a_section_and_one_that_cannot_be_read_says_why(records: Any, tmp_path: Path) -> None:
    for steps in ("9-9", "91-100", "20-29"):
        write(tmp_path / "trace" / f"steps-{steps}", TWO if steps == "91-100" else _window(steps))
    broken = tmp_path / "trace" / "steps-20-29" / "rank0.trace.json.gz"
    broken.write_bytes(broken.read_bytes()[:2000])
    _, found = sections(tmp_path, records)
    assert [re.search(r"goes: ([^<]+)", section)[1] for section in found] == [  # type: ignore[index]
        *("step 9", "steps 20 29", "steps 91 to 100"),
    ]
    assert "The trace cannot be read." in found[1]
    assert "cut off" in found[1]
    assert "<figure" not in found[1]


def _window(steps: str) -> Workload:
    first, last = map(int, steps.split("-"))
    return Workload(first_step=first, num_steps=last - first + 1)


def test_a_run_that_was_not_traced_or_by_nsys_has_no_section(records: Any, tmp_path: Path) -> None:
    assert sections(tmp_path, records)[1] == []
    write(tmp_path / "trace" / "steps-91-100", Workload(facts={"kind": "nsys"}))
    assert time_budgets(tmp_path) == []


def test_long_windows_are_cut(tmp_path: Path) -> None:
    load = Workload(num_steps=50, layers=1, buckets=1)
    write(tmp_path / "trace" / "steps-91-140", load)
    (found,) = time_budgets(tmp_path)
    assert str(found.charts[1]).count('class="y"') == MOST_BARS


def test_nothing_in_a_window_is_obeyed(records: Any, tmp_path: Path) -> None:
    facts = {"recompiles": [{"step": 91, "reason": EVIL}], "settings": SETTINGS | {"techniques.compile": EVIL}}
    write(tmp_path / "trace" / "steps-91-100", Workload(compiling=lambda rank, step: 0.2, facts=facts))
    html, found = sections(tmp_path, records)
    assert "&lt;script" in found[0]
    assert not re.search(r"[\x00\x1b\u202e]", html)
