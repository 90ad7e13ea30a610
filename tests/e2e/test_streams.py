"""Verbs whose output nobody reads: closed, full or left by its reader."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.e2e.commands import reviews, write_csv
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.timeout(400)

PACELINE = [sys.executable, "-m", "paceline"]

SHORT = ["--set", "loop.max_steps=2", "--set", "data.max_length=64", "--set", "device=cpu"]

VERBS = {
    "schema": ["schema"],
    "techniques": ["techniques"],
    "doctor": ["doctor"],
    "help": ["train", "--help"],
    "plan": ["plan", "recipe.yaml", "--gpu", "24GiB", "--set", "device=auto"],
    "check": ["check", "run", "--only", "saved,schedule"],
    "evaluate": ["evaluate", "run"],
    "slurm": ["launch", "slurm", "recipe.yaml", "--processes", "1", "--dry-run"],
}
LIGHT = ("schema", "techniques", "help")
"""Without torch."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data, a recipe and a finished run."""
    place = tmp_path_factory.mktemp("streams")
    write_csv(place / "data.csv", reviews())
    write_tiny_model(place / "model", tiny_bert_config())
    recipe: dict[str, Any] = {
        "model": {"source": str(place / "model")},
        "data": {"source": str(place / "data.csv"), "max_length": 64},
        "loop": {"max_steps": 2},
        "observe": {"console": "off"},
        "device": "cpu",
    }
    paceline.train(recipe, out=place / "run")
    (place / "recipe.yaml").write_text(paceline.Recipe.parse(recipe).to_yaml())
    return place


def run(place: Path, redirection: str, *words: str, stdout: int | None = None) -> tuple[int, str]:
    """Exit code, and standard error as far as that was not redirected."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *PACELINE, *words]
    done = subprocess.run(
        command, cwd=place, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=180
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", [n if n in LIGHT else pytest.param(n, marks=pytest.mark.slow) for n in VERBS])
def test_verbs_whose_output_nobody_reads(place: Path, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, err = run(place, "", *VERBS[name], stdout=writing)
    finally:
        os.close(writing)
    assert code in (0, 141), err
    assert "Traceback" not in err
    code, err = run(place, ">&-", *VERBS[name])
    assert (code, "Traceback" in err) == (0, False), err


@pytest.mark.parametrize(
    "redirection", [">&-", *(pytest.param(r, marks=pytest.mark.slow) for r in (">&- 2>&- <&-", ">/dev/full 2>&1"))]
)
@pytest.mark.parametrize("ranks", [[], pytest.param(["--processes", "2"], marks=pytest.mark.slow)], ids=len)
def test_a_run_that_nobody_reads_is_made(place: Path, tmp_path: Path, redirection: str, ranks: list[str]) -> None:
    code, err = run(place, redirection, "train", "recipe.yaml", *SHORT, "--out", str(tmp_path / "run"), *ranks)
    assert (code, err) == (0, "")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


class Log:
    """A caller's own stream."""

    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("stream", [None, Log()], ids=["none", "log"])
def test_a_callers_own_streams(place: Path, tmp_path: Path, stream: Any) -> None:
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        recipe = paceline.Recipe.load(str(place / "recipe.yaml"), ["observe.console=auto"])
        record = paceline.train(recipe, out=tmp_path / "run")
        rows = paceline.predict(record.folder, ["a lovely film"])
        paceline.doctor()
    assert len(rows) == 1
