"""The command line in this process, and small data to run it on."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.verbs import cli

GOOD, BAD = ("wonderful", "lovely", "superb"), ("dull", "awful", "boring")
THINGS = ("film", "plot", "music", "actor", "scene", "story", "joke")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def first(self) -> str:
        """The first line of what went wrong."""
        return self.err.partition("\n")[0]


Paceline = Callable[..., Done]
"""``paceline("train", "recipe.yaml", ...)``."""


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    """Runs the command as a shell would; an exception that is no user's error passes through, as our bug."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        shown = capsys.readouterr()
        return Done(code, shown.out, shown.err)

    return run


def reviews(count: int = 40, labels: Sequence[str] = ("negative", "positive")) -> list[dict[str, str]]:
    """Different texts, the classes in turn; a class is told by its words."""
    found = []
    for number in range(count):
        at = number % len(labels)
        word = (BAD, GOOD)[at % 2][number % 3]
        thing, other = THINGS[number % 7], THINGS[number // 7 % 7]
        found.append({"text": f"a {word} {thing} and a {other} {number}", "label": labels[at]})
    return found


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], delimiter: str = ",") -> Path:
    rows = list(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
