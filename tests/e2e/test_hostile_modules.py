"""A folder full of files that are named like modules: whatever is typed there, none of them is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import reviews, write_csv
from tests.testing.marks import slow_except
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.timeout(400)

PACKAGES = ("torch", "transformers", "numpy", "yaml", "pydantic", "typer", "rich", "safetensors", "sklearn", "datasets")

SHORT = ["--set", "loop.max_steps=2", "--set", "device=cpu", "--set", "observe.report=false"]

SLURM = ["launch", "slurm", "recipe.yaml", "--processes", "1", "--dry-run"]
TORCHRUN = ["launch", "torchrun", "recipe.yaml", "--hosts", "a,b", "--processes", "1"]

VERBS = {
    "plan": ["plan", "recipe.yaml", "--gpu", "24GiB", "--set", "device=auto"],
    "check": ["check", "recipe.yaml", "--only", "ranks"],
    "ranks": ["train", "recipe.yaml", *SHORT, "--processes", "2"],
    "train": ["train", "recipe.yaml", *SHORT],
    "resume": ["train", "run", "--resume", "--set", "loop.max_steps=3", "--set", "schedule.type=constant"],
    "every claim": ["check", "recipe.yaml"],
    "evaluate": ["evaluate", "run"],
    "predict": ["predict", "run", "data.csv", "-o", "labelled.csv"],
    "report": ["report", "run"],
    "lr": ["lr", "recipe.yaml", "--set", "device=cpu"],
    "trace": ["trace", "recipe.yaml", "--steps", "1:2", *SHORT],
    "memory": ["memory", "recipe.yaml"],
    "doctor": ["doctor"],
    "techniques": ["techniques", "packing"],
    "schema": ["schema"],
    "convert": ["convert", "model"],
    "slurm": SLURM,
    "torchrun": TORCHRUN,
    "bench": ["bench", "recipe.yaml", "--rungs", "paceline", "--repeats", "1", "--steps", "2"],
}
REFUSED = ("memory", "convert")
"""For want of a GPU, and of weights to convert."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model, a recipe, a finished run, and modules that note that they were imported."""
    import paceline

    place = tmp_path_factory.mktemp("hostile")
    write_csv(place / "data.csv", reviews())
    write_tiny_model(place / "model", tiny_bert_config())
    recipe = paceline.Recipe.parse(
        {
            "model": {"source": str(place / "model")},
            "data": {"source": str(place / "data.csv"), "max_length": 64},
            "loop": {"epochs": 1, "batch_size": 8},
            "observe": {"console": "off", "report": False},
            "device": "cpu",
        }
    )
    paceline.train(recipe.with_settings(["loop.max_steps=2"]), out=place / "run")
    (place / "recipe.yaml").write_text(recipe.to_yaml())
    note = f"open({str(place / 'imported')!r}, 'a').write(f'{{__name__}} in {{__import__(\"sys\").orig_argv}}\\n')\n"
    for name in (*sys.stdlib_module_names, *PACKAGES):
        (place / f"{name}.py").write_text(note)
    return place


def run(place: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Carry out a command there; nothing may have been imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(place / "cache"), **variables}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, errors="replace"
    )
    imported = place / "imported"
    assert not imported.exists(), imported.read_text()
    return done


def paceline_script() -> str:
    script = Path(sys.executable).with_name("paceline")
    assert script.exists(), f"{script}: paceline is not installed here"
    return str(script)


@pytest.mark.parametrize(
    "words",
    [
        # that each Python is started by one function, with -P, is a test of the source: architecture/test_safety
        *(pytest.param(words, id=name, marks=pytest.mark.slow) for name, words in VERBS.items()),
    ],
)
def test_no_verb_runs_a_file_of_the_current_folder(hostile: Path, words: list[str]) -> None:
    done = run(hostile, paceline_script(), *words)
    is_refused = words[0] in REFUSED
    assert done.returncode == (2 if is_refused else 0), done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_every_verb_is_walked() -> None:
    from paceline.verbs.cli import app

    walked = {words[0] for words in VERBS.values()}
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    # the first two fetch from the network, in this process; the demo trains as train does, for minutes
    assert verbs - walked == {"data", "restore", "demo"}, "the list above lacks a verb"


@pytest.mark.parametrize("start", ["-m", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_python_m_paceline_leaves_the_folder_out(hostile: Path, tmp_path: Path, start: str) -> None:
    # what Python itself imports before it comes to paceline is Python's own affair
    listed = run(tmp_path, sys.executable, "-c", "import runpy, sys; print(*sys.modules)").stdout.split()
    listed.append("__future__")  # which compiles a file, and is imported by its first line
    for file in hostile.glob("*.py"):
        if file.stem not in listed:
            (tmp_path / file.name).write_text(file.read_text().replace(str(hostile), str(tmp_path)))
    words = [*("train", str(hostile / "recipe.yaml")), *SHORT, "--out", "run"]
    launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] * (start == "torchrun")
    done = run(tmp_path, sys.executable, *launcher, "-m", "paceline", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").exists()


FACTORY = """
import torch

def make(num_labels):
    import neighbour
    return neighbour.Model(num_labels)
"""
NEIGHBOUR = """
import torch

class Model(torch.nn.Module):
    def __init__(self, num_labels):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(300, 8), torch.nn.Linear(8, num_labels)

    def forward(self, input_ids, attention_mask=None, **_):
        return self.out(self.embed(input_ids).mean(1))
"""


@pytest.mark.parametrize("start", slow_except(["script", "-m"], "-m"))
def test_functions_that_a_recipe_names_are_in_the_current_folder(hostile: Path, tmp_path: Path, start: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    settings = ["model.factory=mine:make", "model.source=null", f"model.tokenizer={hostile / 'model'}"]
    words = [*("train", str(hostile / "recipe.yaml")), *SHORT, "--out", "run"]
    words += [word for setting in settings for word in ("--set", setting)]
    begin = [paceline_script()] if start == "script" else [sys.executable, "-m", "paceline"]
    done = run(tmp_path, *begin, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
