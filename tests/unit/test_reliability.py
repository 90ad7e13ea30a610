"""docs/reliability.md names tests that exist: each case has some, or a line why not."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


class Case(NamedTuple):
    """A line of the table."""

    number: int
    fault: str
    outcome: str
    tests: tuple[str, ...]


def cases(text: str) -> list[Case]:
    """The numbered lines of the table; headings between them have no number."""
    table = text.partition("<!-- the cases -->")[2].partition("<!-- end of cases -->")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        if cells[0].isdecimal():
            fault, outcome, *tests = cells[1:]
            found.append(Case(int(cells[0]), fault, outcome, tuple(re.findall(r"`([^`]*)`", " ".join(tests)))))
    return found


@functools.cache
def functions(file: Path) -> frozenset[str]:
    """What pytest would collect of a file: its test functions, parsed alone."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def problems(found: list[Case]) -> list[str]:
    """What is wrong with the table, a line each."""
    told = []
    for case in found:
        is_excused = case.outcome.startswith("none: ") or case.outcome.startswith("none of ")
        if not case.fault or not case.outcome:
            told.append(f"{case.number}: says nothing")
        if not case.tests and not is_excused:
            told.append(f"{case.number}: neither a test nor a reason")
        for name in case.tests:
            file, _, function = name.partition("::")
            if function not in functions(ROOT / file):
                told.append(f"{case.number}: there is no {name}")
    return told


def test_every_case_is_there_once() -> None:
    numbers = [case.number for case in cases(PAGE.read_text(encoding="utf-8"))]
    assert len(numbers) >= 45
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_test_that_is_named_exists() -> None:
    found = problems(cases(PAGE.read_text(encoding="utf-8")))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| 1 | a | b | `tests/unit/test_reliability.py::test_of_yore` |", "1: there is no"),
        ("| 1 | a | b | `tests/unit/test_gone.py::test_every_case_is_there_once` |", "1: there is no"),
        ("| 1 | a | b | |", "1: neither a test nor a reason"),
        ("| 1 | a | | `tests/unit/test_reliability.py::test_every_case_is_there_once` |", "1: says nothing"),
    ],
)
def test_a_line_without_a_test_would_be_seen(row: str, problem: str) -> None:
    (told,) = problems(cases(f"<!-- the cases -->\n{row}\n<!-- end of cases -->"))
    assert told.startswith(problem)


def test_an_honest_line_passes() -> None:
    rows = "| 1 | a | none: b | |\n| 2 | a | b | `tests/unit/test_reliability.py::test_an_honest_line_passes` |"
    assert problems(cases(f"<!-- the cases -->\n{rows}\n<!-- end of cases -->")) == []
