"""Texts and class names that are script, terminal sequences and formulas, through every verb: inert wherever shown."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.e2e.commands import Paceline, write_csv
from tests.e2e.whole_runs import recipe

LABELS = (
    "<script>alert(1)</script>",
    '=HYPERLINK("http://evil")',
    "\x1b[31mred\x1b]0;title\x07",
    "</title><img src=x onerror=alert(1)>",
    "[bold]markup[/bold] \u202e gnp.exe",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    rows = [{"text": f"{LABELS[(at + 1) % 5]} film {at} {LABELS[at % 5]}", "label": LABELS[at % 5]} for at in range(60)]
    return write_csv(tmp_path / "<b>data.csv", rows)


def test_nothing_of_it_is_obeyed(pretrained: Path, hostile: Path, paceline: Paceline, tmp_path: Path) -> None:
    chosen = recipe(pretrained, hostile, observe={"console": "plain", "report": True, "tensorboard": True})
    (tmp_path / "recipe.yaml").write_text(chosen.to_yaml().replace("max_length: 512", "max_length: 64"))
    done = paceline("train", "recipe.yaml", "--out", "run")
    assert done.code == 0, done
    said = [done.out, done.err]
    for arguments in (("evaluate", "run"), ("predict", "run", hostile, "-o", "labelled.csv"), ("report", "run")):
        done = paceline(*arguments)
        assert done.code == 0, done
        said += [done.out, done.err]
    for text in said:
        assert "\x1b" not in text, "a terminal sequence reaches the terminal"
        assert "\u202e" not in text, "a direction override reaches the terminal"
    page = (tmp_path / "run/report.html").read_text()
    for tag in ("<script", "<img", "<b>data"):
        assert tag not in page, f"the page has {tag}"
    assert "Content-Security-Policy" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page, "the name is not shown: this test saw nothing"
    with (tmp_path / "labelled.csv").open(newline="", encoding="utf-8") as file:
        assert {row["label"] for row in csv.DictReader(file)} == set(LABELS), "cells were changed, or rows were cut"
