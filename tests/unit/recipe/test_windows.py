"""Windows as a person writes them, and the steps that they are."""

from __future__ import annotations

import pytest

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from paceline.recipe.recipe import merge, parse_yaml
from paceline.recipe.windows import step_windows

STEPS, PER_EPOCH = 25, 10
"""Two epochs, and half of a third."""


def bounds(*asked: str, steps: int = STEPS) -> list[tuple[int, int]]:
    return [(window.first, window.last) for window in step_windows(asked, steps, PER_EPOCH)]


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("5:8", 6, 8),
        ("0:1", 1, 1),
        ("24:25", 25, 25),
        ("last-epoch", 21, 25),
        ("last-epoch:-1", 25, 25),
        ("last-epoch:-3", 23, 25),
        ("last-epoch:-10", 21, 25),  # a slice of a shorter list is the whole list
    ],
)
def test_a_window_is_a_slice_of_the_steps(asked: str, first: int, last: int) -> None:
    assert bounds(asked) == [(first, last)]
    every = list(range(1, STEPS + 1))
    if not asked.startswith("last"):
        begin, end = map(int, asked.split(":"))
        assert every[begin:end] == list(range(first, last + 1))


@pytest.mark.parametrize(("steps", "first"), [(20, 11), (21, 21), (10, 1), (3, 1)])
def test_the_last_epoch_is_that_of_the_last_step(steps: int, first: int) -> None:
    assert bounds("last-epoch", steps=steps) == [(first, steps)]


def test_windows_that_overlap_are_one_and_those_that_touch_are_two() -> None:
    assert bounds("last-epoch:-1", "last-epoch:-3") == [(23, 25)]
    assert bounds("10:12", "2:4", "3:6", "6:8") == [(3, 6), (7, 8), (11, 12)]
    (both,) = step_windows(["1:4", "3:9"], STEPS, PER_EPOCH)
    assert (both.first, both.last, both.asked, both.name) == (2, 9, "1:4, 3:9", "steps-2-9")
    assert len(both) == 8


@pytest.mark.parametrize(("asked", "never"), [("20:30", "ends"), ("25:26", "opens"), ("90:100", "opens")])
def test_a_window_beyond_the_run_is_refused(asked: str, never: str) -> None:
    with pytest.raises(RecipeError) as raised:
        bounds("1:2", asked)
    assert raised.value.what == f"trace.steps = {asked}: beyond the run"
    assert raised.value.why == f"it has 25 steps, so that the window never {never}"
    # the fix works
    fixed = parse_yaml("a: " + raised.value.fix.partition("=")[2], "x")["a"]
    assert len(bounds(*fixed)) == 1


def recipe(**trace: object) -> Recipe:
    return Recipe.parse({"model": {"source": "some"}, "trace": trace})


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        ({"steps": [95]}, "95 is no window: 94:95 is step 95"),
        ({"steps": ["95"]}, "95 is no window: 94:95 is step 95"),
        ({"steps": ["8:8"]}, "8:8 holds no step"),
        ({"steps": ["last-epoch:-0"]}, "last-epoch:-0 holds no step"),
        ({"steps": ["first-epoch"]}, "'first-epoch' is no window: 90:100"),
        ({"steps": ["-10:"]}, "'-10:' is no window"),
        ({"steps": [{"from": 3}]}, "is no window"),
        ({"steps": "last-epoch"}, "--set 'trace.steps=[last-epoch]'"),
        ({"kind": ["kineto", "nsys"]}, "one of kineto and nsys"),
        ({"kind": "kineto,nsys"}, "one of kineto and nsys"),
        ({"kind": "nsys", "memory": True}, "memory has no effect with kind: nsys"),
        ({"graph": "drop"}, "'launch' or 'keep'"),
    ],
)
def test_what_is_no_window_is_refused(trace: dict[str, object], told: str) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe(**trace)
    assert told in str(raised.value)
    assert raised.value.exit_code == 2


def test_yaml_does_not_take_a_window_for_a_time_of_day() -> None:
    """YAML 1.1 reads 10:20 as ten minutes and twenty seconds."""
    found = parse_yaml("a: [10:20, 90:100, last-epoch:-10]\nb: [10, 0x10, 010, 1_000, -3, 0]", "x")
    assert found == {"a": ["10:20", "90:100", "last-epoch:-10"], "b": [10, 16, 8, 1000, -3, 0]}
    assert merge({}, ["trace.steps=[10:20]"]) == {"trace": {"steps": ["10:20"]}}
    # written out and read again
    kept = recipe(steps=["10:20", "last-epoch"])
    assert Recipe.parse(parse_yaml(kept.to_yaml(), "x")) == Recipe.parse(kept.resolved())
