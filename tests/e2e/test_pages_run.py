"""docs/quickstart.md and README.md, "From Python": their blocks are run one after the other, as a newcomer types them.

The model's name is a folder with a tiny one, for there is no network. The first minute has a test of its own.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Paceline, reviews, write_csv
from tests.e2e.whole_runs import Disturb
from tests.testing.tiny import tiny_distilbert_config, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NAME = "distilbert-base-uncased"
SHORTER = {"train recipes/digits.yaml --out runs/digits": ["--set", "loop.max_steps=3"]}
"""Commands that take longer than a test may."""


def blocks(page: str, begin: str, end: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block between two headings of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    _, found, text = text.partition(f"## {begin}\n")
    assert found, f"{page} has no section {begin!r}"
    text = text.partition(f"\n## {end}\n")[0] if end else text
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def home(paceline: Paceline, tmp_path: Path) -> Path:
    """The current folder: a model, tables and the repository's recipes."""
    write_tiny_model(tmp_path / NAME, tiny_distilbert_config(max_position_embeddings=512))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_csv(tmp_path / "reviews.csv", reviews(80))
    write_csv(tmp_path / "test.csv", reviews(12))
    write_csv(tmp_path / "new.csv", [{"text": row["text"]} for row in reviews(4)])
    return tmp_path


def execute(code: str) -> dict[str, Any]:
    """Run a block of Python; the value of its last line is ``_``."""
    *lines, last = code.strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join([*lines, f"_ = {last}"]), names)
    return names


def test_the_quickstart_runs_as_it_is_typed(home: Path, paceline: Paceline, disturb: Disturb) -> None:
    commands = []
    first = ""
    for language, text in blocks("docs/quickstart.md", "2. A run that needs no network", ""):
        if language == "yaml":
            (home / "reviews.yaml").write_text(text, encoding="utf-8")
        elif language == "python":
            (answer,) = execute(text)["_"]
            assert answer["label"] in ("positive", "negative")
        for line in text.splitlines() if language == "bash" else ():
            program, *words = shlex.split(line)
            assert program == "paceline", line
            first = first or " ".join(words) * ("--model" in words)
            if words[-1] == "--resume":
                shutil.rmtree(home / words[1])
                disturb.signals[2] = signal.SIGTERM
                assert paceline(*shlex.split(first)).code == 75
            done = paceline(*words, *SHORTER.get(" ".join(words), []))
            assert done.code == 0, f"{line}\n{done.err}"
            commands.append(words[0])
    assert commands == ["train"] * 4 + ["evaluate", "predict", "train"]
    assert (home / "out.csv").exists()
    assert (home / "runs/digits/report.html").exists()


@pytest.mark.parametrize(("page", "heading", "end"), [("README.md", "From Python", "In your own loop")])
@pytest.mark.usefixtures("home")
def test_the_python_of_the_readme_runs_as_it_is_typed(page: str, heading: str, end: str) -> None:
    (block,) = [text for language, text in blocks(page, heading, end) if language == "python"]
    names = execute(block)
    assert names["_"] in ("positive", "negative")
    assert names["record"].status == "finished"
