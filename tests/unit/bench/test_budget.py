"""Times as they are typed, and what fits into one."""

from __future__ import annotations

import pytest

from paceline.bench.budget import FEWEST, WELL, expected_seconds, fit, parse_time, steps_that_fit
from paceline.contract.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90s", 90), ("45", 45), ("1h 30m", 5400), ("1h30m", 5400), ("1.5 H", 5400)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "-5m", "0", "m", "m10", "10mm", "2 days"])
def test_what_is_no_time_is_told_with_one(text: str) -> None:
    with pytest.raises(UserError, match="--budget 10m"):
        parse_time(text, "--budget")


def test_the_longest_goes_first_and_of_equal_ones_the_last() -> None:
    seconds = {"a": 5.0, "b": 9.0, "c": 2.0, "d": 9.0}

    def kept(left: float, *spared: str) -> list[str]:
        return fit("abcd", seconds.__getitem__, left, lambda cell: cell in spared)

    assert kept(25) == ["a", "b", "c", "d"]
    assert kept(24.9) == ["a", "b", "c"], "of two equally long cells the later one is dropped"
    assert kept(8) == ["a", "c"]
    assert kept(1) == []
    assert kept(12, "b") == ["b", "c"], "what is spared is dropped last of all"
    assert kept(8, "b") == [], "a spared cell that does not fit goes too"


def test_a_cell_takes_as_long_as_its_like() -> None:
    records = [
        {"rung": "a", "contender": "x", "whole_seconds": 3.0},
        {"rung": "a", "contender": "x", "whole_seconds": 4.0},
        {"rung": "b", "contender": "y", "whole_seconds": 30.0},
        {"rung": "compiled", "contender": "y", "whole_seconds": 500.0},
        {"rung": "d", "contender": "y", "whole_seconds": 20.0},
    ]
    assert expected_seconds({"rung": "a", "contender": "x"}, records) == 4.0, "the longest of its own"
    assert expected_seconds({"rung": "c", "contender": "y"}, records) == 30.0, (
        "the median of its contender's, not one that compiles"
    )
    assert expected_seconds({"rung": "c", "contender": "z"}, records) == 20.0, "the median of all"
    assert expected_seconds({"rung": "c", "contender": "z"}, []) == 0.0, "nothing is known: it has its try"


def test_steps_fill_the_budget_and_repeats_go_before_steps() -> None:
    probe = {"whole_seconds": 12.0, "probed_steps": 8, "step_seconds": 0.5}
    steps, repeats = steps_that_fit(3600, rungs=10, repeats=3, **probe)  # 108 s a cell, 8 of them not for steps
    assert (steps, repeats) == (int(100 / 0.575), 3)
    steps, repeats = steps_that_fit(600, rungs=10, repeats=3, **probe)
    assert repeats < 3
    assert steps >= WELL
    assert steps_that_fit(10, rungs=10, repeats=3, **probe) == (FEWEST, 1), "what is too much even so is dropped later"
