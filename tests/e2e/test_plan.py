"""``paceline plan`` from the command line to the tracing process and back, on models of two layers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.verbs import plan as planning
from tests.e2e.commands import Paceline, in_process, reviews, write_csv
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, write_tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="plans are traced on Linux"),
    pytest.mark.usefixtures("forked_interpreters"),
]

NETS = """
import torch
from torch import nn

class Looks(nn.Module):
    '''Counts the tokens of a batch, which no shape tells.'''
    def __init__(self, num_labels):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 8), nn.Linear(8, num_labels)
    def forward(self, input_ids, attention_mask):
        kept = input_ids[attention_mask.bool()]
        return self.head(self.embed(kept).mean(0, keepdim=True).expand(len(input_ids), -1))

def looks(num_labels=2):
    return Looks(num_labels)
"""


def write_recipe(folder: Path, **changes: Any) -> Path:
    """A BERT of two layers on random tokens; JSON is YAML."""
    plain = {
        "name": "tiny",
        "model": {"config": tiny_bert_config(hidden_size=64, intermediate_size=256)},
        "data": {
            "source": "builtin:random",
            "splits": {"validation": 0.25, "test": 0},
            "random": {"samples": 256, "length": 64, "vocabulary": 1000},
        },
        "loop": {"batch_size": 64},
        **changes,
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(plain))
    return path


@pytest.fixture(scope="module")
def tracing(predictor: Predictor, models_beside: Path) -> Predictor:
    """One process for most tests; it can import a model of one's own."""
    (models_beside / "nets_to_plan.py").write_text(NETS)
    return predictor


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tracing: Predictor) -> Paceline:
    """The command, with the process that is there already: one for both of its threads, which take turns."""
    turn = threading.Lock()

    class Shared:
        def __enter__(self) -> Shared:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def start(self) -> None:
            pass

        def plan(self, *args: Any, **options: Any) -> MemoryPlan:
            with turn:
                return tracing.plan(*args, **options)

    monkeypatch.setattr(planning, "Predictor", Shared)
    return in_process(monkeypatch, capsys)


def test_a_plan_in_json_adds_up(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("plan", write_recipe(tmp_path), "--gpu", "v100-32gb", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    memory = found["memory"]
    assert (memory["gpu"], memory["samples"], memory["slots"]) == ("Tesla V100-SXM2-32GB", 64, 64 * 64)
    assert sum(memory["parts"].values()) == memory["allocated"] <= memory["reserved"]
    assert memory["parts"]["parameters"] == pytest.approx(4 * memory["num_parameters"], rel=0.05)
    assert memory["allocated"] == max(memory["phases"].values())
    assert (found["fits"], found["changes"]) == (True, [])
    assert found["largest_micro_batch"]["samples"] == 64
    chosen = {decision["setting"]: decision["value"] for decision in found["decisions"]}
    assert chosen["techniques.precision"] == "fp32", "a V100 has no bf16"
    assert chosen["data.max_length"] == "64", "what the model decides is among them"


def test_data_that_are_not_here_are_as_long_as_they_may_be(paceline: Paceline, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data={"source": "absent.csv"})
    done = paceline("plan", recipe, "--gpu", "v100-32gb", "--set", "data.max_length=48")
    assert (done.code, done.err) == (0, "")
    assert "64 of the global batch of 64 samples, 3,072 token positions" in done.out
    assert "48 tokens in every text" in done.out
    assert "attention by" in done.out


@pytest.mark.slow
def test_read_data_looks_at_their_lengths(paceline: Paceline, tmp_path: Path) -> None:
    model, data = write_tiny_model(tmp_path / "model"), write_csv(tmp_path / "reviews.csv", reviews())
    recipe = write_recipe(tmp_path, model={"source": str(model)}, data={"source": str(data)}, loop={"batch_size": 8})
    done = paceline("plan", recipe, "--gpu", "v100-32gb", "--json", "--read-data")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert 8 <= found["memory"]["slots"] < 8 * 64, "reviews of a few words"
    assert not any("the most there may be" in text for text in found["memory"]["assumed"])


def test_the_data_are_told_of_as_train_does(paceline: Paceline, tmp_path: Path) -> None:
    doubtful = [*reviews(), {"text": "so so", "label": "nan"}, {"text": "so, so", "label": "Positive"}]
    model, data = write_tiny_model(tmp_path / "model"), write_csv(tmp_path / "reviews.csv", doubtful)
    recipe = write_recipe(tmp_path, model={"source": str(model)}, data={"source": str(data)})
    quick = ("--set", "loop.max_steps=1", "--set", "observe.report=false", "--out", tmp_path / "run")
    done = paceline("train", recipe, "--set", "device=cpu", *quick)
    assert done.code == 0, done.err
    done = paceline("plan", recipe, "--gpu", "v100-32gb", "--json", "--read-data")
    assert (done.code, done.err) == (0, "")
    notices = json.loads(done.out)["notices"]
    for words in ("differ only by case", "called like a missing value: 'nan'", "2 classes have a single row"):
        assert any(words in notice for notice in notices), f"{words}: {notices}"
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["notices"]
    assert set(notices) <= set(told), "train says the same"
    assert json.loads(paceline("plan", recipe, "--gpu", "v100-32gb", "--json").out)["notices"] == notices, (
        "encoded before"
    )


def test_the_recipe_of_a_run_folder_is_planned_as_it_is(paceline: Paceline, tmp_path: Path) -> None:
    """All its settings are written out, those that the machine decided too."""
    asked = Recipe.load(write_recipe(tmp_path), ["data.max_length=64"])
    gpu = gpu_for("v100-32gb")
    resolved = choose(asked, facts_with([gpu], this_machine()))[0]
    (tmp_path / "recipe.yaml").write_text(resolved.to_yaml())
    done = paceline("plan", tmp_path / "recipe.yaml", "--gpu", "v100-32gb", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["memory"]["slots"] == 64 * 64
    assert "techniques.precision" not in {decision["setting"] for decision in found["decisions"]}, "decided before"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"source": "FOLDER/broken"}}, ["broken", "config.json"]),
        ({"model": {"source": "FOLDER/absent"}}, ["no such folder"]),
        ({"model": {"config": {"model_type": "birt"}}}, ["model_type = birt", "did you mean"]),
        (
            {"model": {"config": tiny_resnet_config()}, "data": {"source": "absent"}},
            ["data.image_size: not set", "--set data.image_size=224"],
        ),
        ({"data": {"source": "absent.csv", "max_length": 100}}, ["data.max_length = 100", "positions for 64"]),
        ({"model": {"factory": "nets_to_plan:looks"}}, ["cannot be traced", "aten."]),
        (
            {"model": {"config": {"model_type": "t5", "d_model": 16, "num_layers": 1, "num_heads": 2}}},
            ["a t5 without decoder_start_token_id", "--set model.config.decoder_start_token_id=0"],
        ),
    ],
    ids=["unreadable", "absent", "unknown", "no-shape", "too-long", "untraceable", "no-start"],
)
def test_what_cannot_be_planned_says_why(
    paceline: Paceline, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{'model_type': ")
    recipe = write_recipe(tmp_path, **changes)
    recipe.write_text(recipe.read_text().replace("FOLDER", str(tmp_path)))
    done = paceline("plan", recipe, "--gpu", "v100-32gb", "--json")
    assert (done.code, done.out) == (2, ""), done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_what_would(paceline: Paceline, tmp_path: Path) -> None:
    """A GPU a little larger than its context: every answer was traced, and can be planned again."""
    recipe = write_recipe(
        tmp_path,
        model={"config": tiny_bert_config(hidden_size=128, intermediate_size=512, max_position_embeddings=512)},
        data={
            "source": "builtin:random",
            "splits": {"validation": 0, "test": 0},
            "random": {"samples": 16, "vocabulary": 1000},
        },
        loop={"batch_size": 4},
        techniques={"packing": False, "capture": False},
    )
    asked = ["plan", recipe, "--gpu", "380MiB", "--json"]
    found = json.loads(paceline(*asked).out)
    assert found["fits"] is False
    largest = found["largest_micro_batch"]
    assert 0 < largest["samples"] < largest["too_large"] <= 4
    assert largest["total"] <= found["usable_bytes"]
    best = found["changes"][0]
    assert best["fits"]
    again = json.loads(paceline(*asked, *(f"--set={setting}" for setting in best["settings"])).out)
    assert again["fits"] is True
    assert again["memory"]["total"] == best["total"] == found["memory"]["total"] - best["saving_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process(
    tmp_path: Path, end: signal.Signals, real_interpreters: None
) -> None:
    command = [sys.executable, "-m", "paceline", "plan", write_recipe(tmp_path), "--gpu", "v100-32gb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        workers = wait_for(lambda: children(process.pid))
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -end}.get(end, 128 + end), err.decode()
    assert b"Traceback" not in err
    assert out == b""
    wait_for(lambda: not any(alive(worker) for worker in workers), seconds=60)


def wait_for(found: Any, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return answer


def children(parent: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_a_process_of_its_own_ends_with_the_plan(tmp_path: Path) -> None:
    """The conftest fails a test that leaves one."""
    found = planning.plan(Recipe.load(write_recipe(tmp_path)), gpu="24GiB").memory
    assert found.num_parameters == found.num_trained > 100_000
