"""Somebody else's run folder: no verb runs code out of it, unless the person who gives the command allows that now."""

from __future__ import annotations

import inspect
import json
import shutil
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.contract.errors import UserError
from paceline.recipe.trust import references
from paceline.verbs import cli
from tests.e2e.commands import Paceline, in_process, reviews, write_csv
from tests.testing.tiny import tiny_bert_config, write_tiny_model

EVIL = """
import pathlib
pathlib.Path({sentinel!r}).write_text("run")

def f(*arguments):
    import torch
    return torch.zeros(())

def model(num_labels):
    import torch
    return torch.nn.Linear(4, num_labels)
"""

Harm = Callable[[Path], None]
"""Makes a copy of a run hostile."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny classifier, beside its data."""
    import paceline

    place = tmp_path_factory.mktemp("honest")
    write_csv(place / "data.csv", reviews())
    write_tiny_model(place / "bert", tiny_bert_config())
    recipe = {
        "model": {"source": str(place / "bert")},
        "data": {"source": str(place / "data.csv")},
        "loop": {"epochs": 1, "batch_size": 8},
        "observe": {"console": "off"},
        "device": "cpu",
    }
    paceline.train(paceline.Recipe.parse(recipe), out=place / "run")
    return place


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    """Written by hostile code."""
    return tmp_path / "sentinel"


@pytest.fixture
def hostile(honest: Path, tmp_path: Path, sentinel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run with a module of code beside everything, and the working directory in it."""
    folder = tmp_path / "run"
    shutil.copytree(honest / "run", folder)
    for place in (folder, folder / "model"):
        (place / "evil.py").write_text(EVIL.format(sentinel=str(sentinel)))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    yield folder
    sys.modules.pop("evil", None)


def change(folder: Path, **settings: Any) -> None:
    """Write settings into the recipe of a run folder, as who made the folder can."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    for name, value in settings.items():
        part, _, key = name.partition("__")
        recipe[part][key] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def with_remote_code(folder: Path) -> None:
    change(folder, model__trust_remote_code=True, model__source=str(folder / "model"))
    path = folder / "model" / "config.json"
    names = {"AutoConfig": "evil.f", "AutoModelForSequenceClassification": "evil.f", "AutoTokenizer": ["evil.f", None]}
    config = json.loads(path.read_text()) | {"auto_map": names, "model_type": "evil"}
    path.write_text(json.dumps(config))


def with_factory(folder: Path) -> None:
    change(folder, model__factory="evil:model", model__source=None, model__config=None)


HARMS: dict[str, tuple[Harm, str, str]] = {
    "remote code": (with_remote_code, "model.trust_remote_code", "--trust-remote-code"),
    "factory": (with_factory, "model.factory = evil:model", "--trust-references"),
    "metric": (lambda f: change(f, task__metrics=["evil:f"]), "task.metrics = evil:f", "--trust-references"),
    "loss": (lambda f: change(f, task__loss="evil:f"), "task.loss = evil:f", "--trust-references"),
    "schedule": (lambda f: change(f, schedule__type="evil:f"), "schedule.type = evil:f", "--trust-references"),
    "group's schedule": (
        lambda f: change(f, optimizer__groups=[{"match": "*", "schedule": {"type": "evil:f"}}]),
        "optimizer.groups[0].schedule.type = evil:f",
        "--trust-references",
    ),
}

REFUSING: dict[str, list[str]] = {
    "check": ["{run}"],
    "train": ["{run}", "--resume", "--set", "loop.epochs=2"],
    "trace": ["{run}/recipe.yaml"],
    "plan": ["{run}/recipe.yaml", "--gpu", "24GiB"],
    "memory": ["{run}/recipe.yaml"],
    "lr": ["{run}/recipe.yaml"],
    "bench": ["{run}/recipe.yaml", "--out", "{out}"],
    "evaluate": ["{run}"],
    "predict": ["{run}", "{data}", "-o", "{out}"],
}
"""Verb -> what is given to it; it would run what the recipe names."""

READING: dict[str, list[str]] = {
    "report": ["{run}"],
    "convert": ["{run}/model"],
    "restore": ["{run}", "--out", "{out}"],
}
"""Verbs that take a run folder and run nothing of it, whatever it names."""

NEITHER = {"launch", "demo", "doctor", "techniques", "schema", "data"}


def command(verb: str, honest: Path, folder: Path) -> list[str]:
    places = {"run": folder, "data": honest / "data.csv", "out": folder.parent / "out.csv"}
    return [verb, *(word.format(**places) for word in (REFUSING | READING)[verb])]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


def test_every_verb_is_walked() -> None:
    names = {found.name or found.callback.__name__ for found in cli.app.registered_commands}
    groups = {str(found.name) for found in cli.app.registered_groups}
    assert names | groups == {*REFUSING, *READING, *NEITHER}, "a new verb: does it read a run folder?"
    taking = {
        found.name or found.callback.__name__
        for found in cli.app.registered_commands
        if "trust_references" in inspect.signature(found.callback).parameters
    }
    assert taking == set(REFUSING)


@pytest.mark.parametrize("harm", HARMS)
def test_no_verb_runs_what_a_folder_names(
    harm: str, honest: Path, hostile: Path, sentinel: Path, paceline: Paceline
) -> None:
    does, named, switch = HARMS[harm]
    does(hostile)
    for verb in REFUSING:
        done = paceline(*command(verb, honest, hostile))
        assert not sentinel.exists(), f"{verb} ran the folder's code"
        assert done.code == 2, f"{verb}: {done.out}{done.err}"
        assert named in done.err, f"{verb}: {done.err}"
        assert switch in done.err, f"{verb}: {done.err}"
    for verb in READING:
        paceline(*command(verb, honest, hostile))
        assert not sentinel.exists(), f"{verb} ran the folder's code"


@pytest.mark.parametrize("harm", ["metric", "remote code"])
def test_a_persons_word_lets_it_run(
    harm: str, honest: Path, hostile: Path, sentinel: Path, paceline: Paceline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above can fail: with the switch the same code does run."""
    import os

    monkeypatch.setenv("HF_MODULES_CACHE", str(hostile.parent / "modules"))
    does, _, switch = HARMS[harm]
    does(hostile)
    before = dict(os.environ)
    try:
        paceline(*command("evaluate", honest, hostile), switch)
    except Exception:
        pass
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert sentinel.exists()


def test_a_recipe_file_of_ones_own_needs_no_switch(
    honest: Path, hostile: Path, sentinel: Path, paceline: Paceline, tmp_path: Path
) -> None:
    change(hostile, task__metrics=["evil:f"])
    own = tmp_path / "own.yaml"
    own.write_text((hostile / "recipe.yaml").read_text())
    paceline("train", own, "--out", tmp_path / "new", "--set", "loop.max_steps=1")
    assert sentinel.exists()


def test_what_the_command_line_names_is_the_persons_own(
    honest: Path, hostile: Path, sentinel: Path, paceline: Paceline
) -> None:
    """Also where the folder names something else there."""
    change(hostile, task__loss="nowhere:f")
    paceline(*command("train", honest, hostile), "--set", "task.loss=evil:f")
    assert sentinel.exists()


LIBRARY = """
from torch import nn

def tiny(*, weights=None, **sizes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, sizes["num_classes"]))
"""


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torchvision where packages are installed."""
    models = tmp_path / "site-packages" / "torchvision" / "models"
    models.mkdir(parents=True)
    (models.parent / "__init__.py").touch()
    (models / "__init__.py").write_text(LIBRARY)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site-packages")])
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


@pytest.mark.usefixtures("torchvision")
def test_models_of_an_installed_library_need_no_switch(
    paceline: Paceline, tmp_path: Path, sentinel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "model": {"factory": "torchvision.models:tiny"},
        "data": {"source": "builtin:digits", "splits": {"train": 64, "validation": 20, "test": 20}},
        "loop": {"epochs": 1, "batch_size": 32},
        "observe": {"console": "off", "report": False},
        "device": "cpu",
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert paceline("train", tmp_path / "r.yaml", "--out", tmp_path / "run").code == 0
    assert paceline("evaluate", tmp_path / "run").code == 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    # a package of the name beside the run is somebody's
    (tmp_path / "run" / "torchvision").mkdir()
    (tmp_path / "run" / "torchvision" / "__init__.py").write_text(EVIL.format(sentinel=str(sentinel)))
    monkeypatch.chdir(tmp_path / "run")
    done = paceline("evaluate", ".")
    assert (done.code, sentinel.exists()) == (2, False), done.err
    assert "model.factory = torchvision.models:tiny" in done.err


def test_python_asks_for_trust_too(hostile: Path) -> None:
    import paceline as library

    change(hostile, task__metrics=["evil:f"])
    for call in (lambda: library.evaluate(hostile), lambda: library.resume(hostile, ["loop.epochs=2"])):
        with pytest.raises(UserError, match=r"task\.metrics = evil:f"):
            call()


def test_every_reference_that_is_resolved_is_asked_for() -> None:
    """``resolve`` names its setting; each of them is one that ``references`` finds."""
    import re

    import paceline as library

    root = Path(library.__file__).parent
    found = {
        setting
        for path in root.rglob("*.py")
        for setting in re.findall(r'\bresolve\(\w+, "([\w.]+)"', path.read_text(encoding="utf-8"))
    }
    recipe = library.Recipe.parse(
        {
            "model": {"factory": "a:b"},
            "data": {"source": "x"},
            "task": {"loss": "a:b", "metrics": ["a:b"]},
            "schedule": {"type": "a:b"},
        }
    )
    assert found, "resolve is called otherwise now"
    assert found <= references(recipe).keys()
