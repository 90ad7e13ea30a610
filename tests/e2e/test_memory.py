"""``paceline memory`` from the command line to the process that measures and back; no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import TraceError
from paceline.contract.records import MemoryPlan, MemoryStages
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.measure import COMMAND, measure
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.verbs import memory as measuring
from paceline.verbs import plan as planning
from tests.e2e.commands import Paceline, in_process
from tests.unit.memory.plans import HERE
from tests.unit.memory.test_stages import EAGER, TINY, bert, plan

pytestmark = pytest.mark.usefixtures("forked_interpreters")

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "memory_anatomy.yaml"
GPU = gpu_for("h200")


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """A machine with a GPU, on which every run takes the same; collects what is measured."""
    asked: list[Recipe] = []

    def measured(recipe: Recipe, **options: Any) -> MemoryStages:
        asked.append(recipe)
        return bert(others=options["others"])

    class Predicts:
        def __enter__(self) -> Predicts:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def plan(self, *_: object, **__: object) -> MemoryPlan:
            return plan()

    monkeypatch.setattr(measuring, "this_machine", lambda: facts_with([GPU], HERE))
    monkeypatch.setattr(measuring, "measure", measured)
    monkeypatch.setattr(measuring, "taken_by_others", lambda gpu: 0)
    monkeypatch.setattr(measuring, "Predictor", Predicts)
    return asked


LADDER = (
    "loop.micro_batch_size=1",
    "techniques.recompute=true",
    "techniques.precision=fp16",
    "optimizer.type=adamw8bit",
)


def test_the_tutorials_ladder(paceline: Paceline, gpu: list[Recipe], tmp_path: Path) -> None:
    done = paceline("memory", RECIPE, *(f"--with={change}" for change in LADDER), "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("memory_anatomy on NVIDIA H200, stage by stage\n")
    assert done.out.count("first backward") == len(LADDER) + 1
    assert [f"+ {change}" in done.out for change in LADDER] == [True] * len(LADDER)
    assert done.out.endswith(f"wrote {tmp_path / 'out' / 'report.html'}\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["memory.json", "report.html"]
    assert [recipe.loop.micro_batch_size for recipe in gpu] == [4, 1, 1, 1, 1]
    assert [recipe.techniques.recompute for recipe in gpu] == [False, False, True, True, True]
    assert [recipe.techniques.precision for recipe in gpu] == ["fp32", "fp32", "fp32", "fp16", "fp16"]
    assert [recipe.optimizer.type for recipe in gpu] == ["adamw"] * 4 + ["adamw8bit"]
    first = gpu[0]
    assert (first.device, first.loop.batch_size) == ("cuda", 4)
    assert first.techniques.capture is first.techniques.packing is first.techniques.fusion is False


def test_a_plan_that_cannot_be_traced_is_measured_on_this_machines_gpu(
    paceline: Paceline, gpu: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def untraceable(*_: object, **__: object) -> None:
        raise TraceError("the model's step cannot be traced without a GPU", "aten.nonzero asks for numbers", "measure")

    monkeypatch.setattr(planning, "plan", untraceable)
    done = paceline("plan", RECIPE)
    assert done.code == 0, done.err
    assert "aten.nonzero asks for numbers; so its first steps are measured on this GPU" in done.err
    assert done.out.startswith("memory_anatomy on NVIDIA H200, stage by stage\n")
    assert len(gpu) == 1
    other = paceline("plan", RECIPE, "--gpu", "a100-80gb")
    assert (other.code, other.out, len(gpu)) == (2, "", 1), "another GPU cannot be measured here"
    assert "aten.nonzero" in other.err


def test_json_is_one_object(paceline: Paceline, gpu: list[Recipe]) -> None:
    done = paceline("memory", RECIPE, "--with", "techniques.recompute=true", "--json", "--set", "seed=3")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert [rung["settings"] for rung in found["ladder"]] == [[], ["techniques.recompute=true"]]
    assert [each["name"] for each in found["ladder"][0]["stages"]] == EAGER
    assert {recipe.seed for recipe in gpu} == {3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((RECIPE,), ["no GPU to measure on", "no NVIDIA GPU is visible", "paceline plan RECIPE --gpu h200"]),
        ((RECIPE, "--set", "device=cpu"), ["device = cpu", "paceline plan"]),
        ((RECIPE, "--with", "recompute"), ["--with 'recompute'", "key=value"]),
        ((RECIPE, "--with", "techniques.recompte=true"), ["techniques.recompte", "unknown key", "recompute"]),
        ((RECIPE, "--set", "loop.batch_size=none"), ["loop.batch_size"]),
        (("absent.yaml",), ["absent.yaml: no such recipe"]),
        ((ROOT / "recipes",), ["is a folder", "paceline memory"]),
        (("rows.csv",), ["--model: missing", "paceline memory --model distilbert-base-uncased --data rows.csv"]),
        ((), ["--model and --data: missing"]),
    ],
    ids=lambda value: "",
)
def test_a_mistake_is_told_before_anything_runs(paceline: Paceline, arguments: Any, words: list[str]) -> None:
    if this_machine().cuda_problem is None and arguments == (RECIPE,):
        pytest.skip("this machine has a GPU")
    done = paceline("memory", *arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("option", ["--set", "--with"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("device=cpu", "this run uses none"),
        ("model.train=features", "no step is made"),
        ("parallel.strategy=dp", "one GPU is measured"),
        ("data.source=memory", "no rows"),
    ],
)
def test_what_has_no_stages_is_refused(
    paceline: Paceline, gpu: list[Recipe], option: str, setting: str, words: str
) -> None:
    done = paceline("memory", RECIPE, option, setting)
    assert done.code == 2, done.err
    assert words in done.err
    assert not gpu


def test_a_folder_that_cannot_be_written_to(paceline: Paceline, gpu: list[Recipe], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = paceline("memory", RECIPE, "--out", tmp_path / "file" / "out")
    assert done.code == 2, done.err
    assert "Traceback" not in done.err


def tiny(*settings: str) -> Recipe:
    return choose(Recipe.parse(TINY).with_settings(settings), this_machine())[0]


@pytest.mark.slow
def test_a_process_of_its_own_measures_a_run() -> None:
    heard: list[str] = []
    found = measure(tiny(), heard=lambda stage: heard.append(stage.name))
    assert (found.problem, found.traceback) == ("", "")
    assert [stage.name for stage in found.stages] == heard == EAGER
    assert found.num_steps == 6
    assert found.step_seconds is not None


@pytest.mark.slow
def test_what_train_would_refuse_comes_back_whole() -> None:
    found = measure(tiny("loop.batch_size=50", "loop.drop_last=true"))
    assert found.problem.splitlines()[0] == "loop.batch_size = 50"
    assert "why: with drop_last" in found.problem
    assert [stage.name for stage in found.stages] == EAGER[:3]
    assert found.traceback == ""


@pytest.mark.slow
def test_a_process_whose_asker_was_killed_lets_go_of_the_gpu() -> None:
    """Its pipe is closed, which is all that it sees of kill -9."""
    request = json.dumps({"recipe": tiny("data.random.samples=100000").plain(), "others": None})
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            assert b'"context"' in process.stdout.readline()
            process.stdin.close()
            started = time.monotonic()
            out = process.stdout.read()
            assert process.wait(30) == 1
            assert b"steady" not in out
            assert time.monotonic() - started < 10
        finally:
            process.kill()


def test_the_command_answers_without_torch(tmp_path: Path, real_interpreters: None) -> None:
    code = "import sys, paceline.verbs.memory; print(*{'torch', 'transformers', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [], "a machine without a GPU is told at once"
