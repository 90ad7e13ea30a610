"""The table of ``benchmarks/splits.py``: what is compared with what, and what stands where there is no figure."""

from __future__ import annotations

from typing import Any

from benchmarks.splits import recipe_of, table
from paceline.recipe import Recipe


def record(question: str, way: str, number: int = 0, **found: Any) -> dict[str, Any]:
    return {"question": question, "round": number, "way": way, **found}


def test_losses_are_beside_the_first_way_and_rates_are_medians() -> None:
    records = [
        record("equal", "ddp", losses=[1.0, 0.5]),
        record("equal", "fsdp", losses=[1.0, 0.505]),
        *(
            record("fast", "fsdp", n, samples_per_second=rate, memory=None)
            for n, rate in enumerate((90.0, 100.0, 400.0))
        ),
    ]
    assert "| fsdp | 1.0e-02 | 100 (90 to 400, n=3) |  | not predicted |" in table(records, 2).splitlines()


def test_the_plan_is_beside_the_peak() -> None:
    records = [
        record("planned", "ddp", allocated=103 * 2**20),
        record("fast", "ddp", samples_per_second=10.0, memory={"allocated": 100 * 2**20}),
    ]
    assert "| ddp | not run | 10 | 100 | +3.0% |" in table(records, 2).splitlines()


def test_a_way_without_a_figure_says_why() -> None:
    records = [
        record("equal", "ddp", losses=[1.0]),
        record("equal", "tensor 2", error="paceline: parallel.tensor = 2\n  why: 3 heads\n  fix: parallel.tensor=3"),
    ]
    lines = table(records, 1).splitlines()
    assert "| tensor 2 | needs 2 GPUs |  |  |  |" in lines
    assert "| tensor 2 | 3 heads | not run |  |  |" in table(records, 2).splitlines()


def test_the_recipes_are_recipes() -> None:
    for question in ("equal", "fast"):
        assert Recipe.parse(recipe_of(question, "tiny", [])).loop.max_steps == 12
