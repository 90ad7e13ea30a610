"""Fixes of the data readers, typed as printed: each way out that is a setting gets past the error that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from paceline.contract.errors import UserError
from paceline.data.sources import read
from paceline.recipe import Recipe, merge
from tests.unit.test_fixes import typed_options

WORDS = ("good", "bad")
TEXTS = [f"text {number}" for number in range(60)]
BITS = [f"{number:06b}" for number in range(60)]


def csv(*columns: str, **cells: list[str]) -> str:
    """A table of 60 rows; a column without cells has the texts."""
    rows = zip(*(cells.get(column, TEXTS) for column in columns), strict=True)
    return "\n".join([",".join(columns), *(",".join(f'"{cell}"' for cell in row) for row in rows), ""])


def json_lines(labels: list[str]) -> str:
    return "".join(f'{{"text": "{text}", "label": {label}}}\n' for text, label in zip(TEXTS, labels, strict=True))


def cycle(*cells: str) -> list[str]:
    return [cells[number % len(cells)] for number in range(60)]


BIT = cycle("0", "1", "1")


class Case(NamedTuple):
    """Files, settings beside the source ``a.*``, and how many ways out the fix types."""

    files: dict[str, str | bytes]
    settings: Mapping[str, Any] = MappingProxyType({})
    ways: int = 1
    column: str = "klass"


TWO = csv("text", "label", label=cycle(*WORDS))
CASES = {
    "no known label": Case({"a.csv": csv("text", "klass", klass=cycle(*WORDS))}),
    "two unknown labels": Case({"a.csv": csv("text", "klass", "other", klass=cycle(*WORDS), other=cycle("x", "y"))}),
    "two texts": Case({"a.csv": csv("aaa", "bbb", "label", label=cycle(*WORDS))}),
    "no such text": Case({"a.csv": TWO}, {"data": {"text": "body"}}, column="text"),
    "no such label": Case({"a.csv": TWO}, {"data": {"label": "labels"}}, column="label"),
    "two roles": Case({"a.csv": TWO}, {"data": {"text": "label"}}, column="text"),
    "thousands or decimals": Case({"a.csv": csv("text", "label", label=cycle("1,000", "2,000"))}, ways=3),
    "joined or decimals": Case({"a.csv": csv("text", "label", label=cycle("1", "2", "1,2"))}, ways=2),
    "several notations": Case({"a.csv": csv("text", "label", label=cycle("5%", "0.5", "$7", "8"))}),
    "bits": Case({"a.csv": csv("text", "label", label=BITS)}, ways=3),
    "many labels": Case({"a.csv": csv("text", "label", "klass", label=TEXTS, klass=cycle(*WORDS))}, ways=2),
    "a list of one": Case({"a.jsonl": json_lines(cycle("[0]", "[1]"))}),
    "lists for one label": Case(
        {"a.jsonl": json_lines(cycle('["a", "b"]', '["a"]'))}, {"task": {"type": "regression"}}
    ),
    "one label for several": Case(
        {"a.csv": csv("text", "label", "A", "B", "C", label=cycle(*WORDS), A=BIT, B=BIT, C=BIT)},
        {"task": {"type": "multi_label"}},
        ways=2,
    ),
    "words for numbers": Case(
        {"a.csv": csv("text", "label", label=[*cycle("1.5", "2.5")[:-1], "bad"])}, {"task": {"type": "regression"}}
    ),
    "an empty text": Case({"a.csv": TWO.replace('"text 3",', '"",') + TWO.partition("\n")[2] * 2}),
    "an empty label": Case({"a.csv": TWO.replace('"text 3","bad"', '"text 3",""') + TWO.partition("\n")[2] * 2}),
    "an unknown split": Case(
        {"a.csv": csv("text", "label", "split", label=cycle(*WORDS), split=cycle("trian", "tets"))}
    ),
    "another encoding": Case(
        {"a.csv": TWO.replace("text", "Straße für Käse").replace("Straße für Käse,", "text,").encode("cp1252")},
        {"data": {"encoding": "utf-8"}},
    ),
    "a test without labels": Case({"a.csv": TWO, "b.csv": csv("text", "id")}, {"data": {"test": "b.csv"}}),
    "a folder whose test has no labels": Case({"train.csv": TWO, "val.csv": TWO, "test.csv": csv("text", "id")}),
    "tables that are no pieces": Case({"a.csv": TWO, "other.csv": TWO}, {"data": {"source": "."}}),
    "splits twice": Case(
        {"a.csv": csv("text", "label", "split", label=cycle(*WORDS), split=cycle("train", "test")), "b.csv": TWO},
        {"data": {"test": "b.csv"}},
    ),
}


def recipe_of(case: Case, options: list[str]) -> Recipe:
    source = next((name for name in case.files if name.startswith("a.")), ".")
    settings: Mapping[str, Any] = {"model": {"source": "m"}, "data": {"source": source}}
    for part, values in case.settings.items():
        settings = {**settings, part: {**settings.get(part, {}), **values}}
    return Recipe.parse(merge(settings, options))


@pytest.mark.parametrize("name", CASES)
def test_each_way_out_of_an_error_gets_past_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    for file, content in case.files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    def problem(options: list[str]) -> UserError | None:
        recipe = recipe_of(case, options)
        try:
            read(recipe.data, task=recipe.task.type)
        except UserError as error:
            return error
        return None

    error = problem([])
    assert error is not None, "nothing is refused"
    ways = typed_options(re.sub(r"\bCOLUMN\b", case.column, error.fix))
    assert len(ways) == case.ways, error.fix
    for way in ways:
        after = problem(way)
        assert after is None or str(after).partition("\n")[0] != str(error).partition("\n")[0], (way, str(after))
