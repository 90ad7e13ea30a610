"""Fixes about runs and models, typed as printed: the command of the message, or its options in place of others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.commands import Paceline, reviews, write_csv
from tests.testing.tiny import tiny_bert_config

QUIET = {"console": "off", "report": False}


@pytest.fixture
def run(paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of a recipe ``r.yaml`` beside its table, in the current folder."""
    import yaml

    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "rows.csv", reviews())
    model = {"config": tiny_bert_config(), "vocabulary_size": 300}
    recipe = {
        "model": model,
        "data": {"source": "rows.csv"},
        "loop": {"max_steps": 2, "batch_size": 8},
        "observe": QUIET,
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert paceline("train", "r.yaml", "--out", "run").code == 0
    return tmp_path / "run"


def typed(words: list[str], fix: str) -> list[str]:
    """The command that a fix gives, or ``words`` with its first options, which replace those of the same name."""
    first = re.split(r",? or |; ", fix)[0]
    if command := re.search(r"paceline (.+?)(?:,|$| makes | goes on| trains on)", first):
        return shlex.split(command[1])
    options = re.findall(r"--[a-z-]+ (?:'[^']*'|\S+)", first)
    names = {option.partition(" ")[0] for option in options}
    names |= {"--model"} if "model.source=" in fix else set()
    kept = [word for at, word in enumerate(words) if not {word, words[at - 1]} & (names - {"--set"})]
    return [*kept, *(word for option in options for word in shlex.split(option))]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "r.yaml", "--out", "run"],
        ["train", "run", "--resume"],
        ["evaluate", "run", "--split", "dev"],
        ["train", "--model", "run", "--data", "rows.csv", "--out", "other", "--set", "loop.max_steps=1"],
        ["train", "r.yaml", "--out", "other", "--set", "loop.batch_size=8", "--set", "loop.micro_batch_size=16"],
        ["train", "r.yaml", "--out", "other", "--set", "data.max_length=5000"],
        ["train", "r.yaml", "--out", "other", "--set", "model.train=last:99"],
        ["evaluate", "run", "--data", "unnamed.csv"],
    ],
    ids=lambda words: " ".join(words),
)
def test_the_fix_of_a_run_works_as_it_is_typed(paceline: Paceline, run: Path, words: list[str]) -> None:
    rows = [{"body": row["text"], "klass": row["label"]} for row in reviews()]
    write_csv(run.parent / "unnamed.csv", rows)
    refused = paceline(*words)
    assert refused.code == 2, refused.err
    fix = refused.err.partition("  fix: ")[2]
    assert fix, refused.err
    again = typed(words, fix.strip())
    assert again != words, fix
    done = paceline(*again)
    assert done.code == 0, (fix, again, done.err)
