"""SIGKILL at every call with which a run writes its files and its model: each is whole or absent, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROLOGUE = """
import io, json, os, signal, sys
from pathlib import Path
import torch
from paceline.models import saved as module
from paceline.models.saved import SavedModel, load_saved, save_model
from paceline.recipe import Recipe
from paceline.run_folder import RunFolder
from tests.testing.tiny import tiny_bert_config
import transformers.modeling_utils as transformers_module

torch.set_num_threads(1)
place = Path(sys.argv[1])
CALLS = ("fsync", "replace", "rename", "mkdir", "open", "chmod", "unlink", "rmdir", "write", "ftruncate", "pwrite")

class Kill:
    def __init__(self, at, after):
        self.at, self.after, self.calls = at, after, 0

    def around(self, call):
        def wrapped(*arguments, **named):
            self.calls += 1
            result = call(*arguments, **named) if self.calls < self.at or self.after else None
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapped

def killed(at, after, work):
    "Whether a child that does the work was killed at that call; it may have fewer."
    child = os.fork()
    if child == 0:
        kill = Kill(at, after)
        for name in CALLS:
            setattr(os, name, kill.around(getattr(os, name)))
        io.open = kill.around(io.open)
        transformers_module.safe_save_file = kill.around(transformers_module.safe_save_file)
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return os.WIFSIGNALED(status)

def each(work_in, check):
    "Kills a child at every call of ``work_in(folder)``; then ``check(folder)``."
    kills = 0
    for after in (False, True):
        for at in range(1, 400):
            folder = place / f"{at}-{after}"
            was_killed = killed(at, after, work_in(folder))
            check(folder, was_killed)
            if not was_killed:
                break
            kills += 1
    print(json.dumps({"kills": kills}))
"""

FILES = """
RECIPE = Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}})
FACTS = dict(command=["paceline"], hardware={}, data_fingerprint="f", seeds={})

def work_in(folder):
    def work():
        with RunFolder.create(folder) as run:
            run.write_recipe(RECIPE)
            run.write_manifest(**FACTS)
            run.metrics.write_bytes(b"{}\\n" * 3)
            run.truncate_metrics(2)
    return work

def check(folder, was_killed):
    if (folder / "recipe.yaml").exists():
        run = RunFolder.open(folder)
        assert run.read_recipe().model.source == "m"
        if run.manifest.exists():
            assert len(run.read_manifest()["starts"]) == 1
        if run.metrics.exists():
            assert set(run.metrics.read_bytes().splitlines()) <= {b"{}"}
    elif folder.exists():
        run = RunFolder.create(folder)
    else:
        return
    with run:
        run.write_recipe(RECIPE)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert hidden == [".lock"], hidden

each(work_in, check)
"""

MODEL = """
from transformers import BertConfig, BertForSequenceClassification
RECIPE = Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}})
TOLD = SavedModel(label_names=("a", "b"), kind="classification", modality="text")

def model(value):
    made = BertForSequenceClassification(BertConfig(**tiny_bert_config(vocab_size=50)))
    with torch.no_grad():
        made.classifier.bias.fill_(value)
    return made

old, new = model(1.0), model(2.0)

def work_in(folder):
    with RunFolder.create(folder) as run:
        run.write_recipe(RECIPE)
        save_model(old, None, run.model, TOLD)
    return lambda: save_model(new, None, folder / "model", TOLD)

def check(folder, was_killed):
    found = load_saved(folder / "model").model.classifier.bias
    assert found.tolist() in ([1.0, 1.0], [2.0, 2.0]), found
    with RunFolder.open(folder) as run:
        save_model(new, None, run.model, TOLD)
    assert load_saved(folder / "model").model.classifier.bias.tolist() == [2.0, 2.0]
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert hidden == [".lock"], hidden

each(work_in, check)
"""


def run(script: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", PROLOGUE + script, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_files_of_a_run_folder(tmp_path: Path) -> None:
    assert run(FILES, tmp_path)["kills"] > 30


def test_a_model_in_the_place_of_another(tmp_path: Path) -> None:
    assert run(MODEL, tmp_path)["kills"] > 20
