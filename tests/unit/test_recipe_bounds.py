"""Recipes that would fill the memory, or the stack, or write numbers that Python cannot: refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe, parse_yaml

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
)
CHAIN = "\n".join(["a: &x0 [1]", "b:", *(f"- &x{n + 1} [*x{n}]" for n in range(2000))])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "its aliases stand for 4,412,961,5"),
        (LAUGHS.replace("[", "{a: ").replace("]", "}").replace(", ", ", b: ", 1), "not|expected|aliases"),
        (CHAIN, "nested too deeply"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: " + "{a: " * 50_000, "nested too deeply"),
        ("\n".join(" " * level + "a:" for level in range(2000)), "nested too deeply"),
        ("a: &a [*a]", "an alias stands for what it is in"),
        ("&a {b: *a}", "an alias stands for what it is in"),
        ("seed: " + "9" * 5000, "a number of 5,000 characters"),
        ("seed: 0x" + "f" * 5000, "a number of 5,002 characters"),
        ("name: 2026-02-30", "in quotes: '2026-02-30'"),
        ("seed: 0x_", "in quotes: '0x_'"),
    ],
    ids=[
        "aliases",
        "mappings",
        "chain",
        "lists",
        "maps",
        "block",
        "self",
        "own map",
        "long",
        "hex",
        "date",
        "no number",
    ],
)
def test_a_small_text_that_stands_for_too_much(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        parse_yaml(text, "r.yaml")


def test_aliases_of_what_is_small_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: [*a, *a]\n", "r.yaml") == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}]}


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, "[" * 2000, "{a: " * 2000, LAUGHS])
def test_a_setting_that_is_none_is_shown_in_short(value: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse({"model": {"source": "m"}}).with_settings([f"seed={value}"])
    assert len(str(error.value)) < 500


def test_what_looks_like_a_date_is_text_where_it_is_none() -> None:
    assert Recipe.parse({"model": {"source": "m"}}).with_settings(["name=2026-02-30"]).name == "2026-02-30"


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 10**5000},
        {"optimizer": {"lr": 10**5000}},
        {"bogus": 10**5000},
        {"model": {"source": "m", "config": {"a": [10**5000]}}},
        {"model": {"source": "m", "config": nested(500)}},
    ],
)
def test_data_given_from_python(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"bits|too deeply") as error:
        Recipe.parse({"model": {"source": "m"}, **settings})
    assert len(str(error.value)) < 500


def test_data_that_hold_themselves() -> None:
    config: dict[str, Any] = {}
    config["config"] = config
    with pytest.raises(RecipeError, match="too deeply"):
        Recipe.parse({"model": {"source": "m", "config": config}})
