"""Stage by stage: which stages there are, what each is charged with, and what a plan is compared with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.errors import ModelError, RecipeError, UserError
from paceline.contract.records import MemoryPlan, MemoryStages, StageRecord
from paceline.engine.torch_engine import TorchEngine
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory import measure as measuring
from paceline.memory import stages as module
from paceline.memory.gauge import Gauge, GpuGauge, NoGauge, Reading
from paceline.memory.measure import measure, taken_by_others
from paceline.memory.predict import PlanFailed
from paceline.memory.stages import Passes, Stages, Steady, measure_stages
from paceline.optim.gradients import FlatGradients
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.report.stages import predicted, stages_page
from paceline.seams import Batch
from paceline.verbs.memory import Anatomy, NothingMeasured, ladder, measured, shown, write
from tests.testing.tiny import tiny_bert_config
from tests.unit.memory.plans import GIB, HERE, MIB, memory_plan
from tests.unit.report.test_report import EVIL, Page, assert_inert

GPU = gpu_for("v100-32gb")
WITH_GPU = facts_with([GPU], HERE)
WITH_GPU = replace(WITH_GPU, versions={**WITH_GPU.versions, "bitsandbytes": None, "torchao": None})

TINY: dict[str, Any] = {
    "name": "tiny",
    "device": "cpu",
    "model": {"config": tiny_bert_config()},
    "data": {
        "source": "builtin:random",
        "max_length": 16,
        "splits": {"validation": 0, "test": 0},
        "random": {"samples": 24, "length": [4, 16], "vocabulary": 200},
    },
    "loop": {"batch_size": 4, "epochs": 1},
}
EAGER = ["context", "model", "checks", "optimizer", "forward", "backward", "update", "steady"]


class Counting(Gauge):
    """Each reading holds one byte more than the one before."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> Reading:
        self.count += 1
        return Reading(allocated=self.count, peak=self.count, reserved=self.count, in_use=self.count)


# ---- the stages of real steps, on a CPU


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLING_STEPS", 1)
    monkeypatch.setattr(module, "TIMED_STEPS", 2)


def staged(*settings: str, gauge: Gauge | None = None) -> tuple[list[StageRecord], Steady]:
    told: list[StageRecord] = []
    used = gauge or NoGauge()
    recipe, _ = choose(Recipe.parse(TINY).with_settings(settings), this_machine())
    return told, measure_stages(recipe, Stages(used, told.append), used)


def test_the_stages_of_a_run_in_their_order(few_steps: None) -> None:
    told, steady = staged(gauge=Counting())
    assert [stage.name for stage in told] == EAGER
    assert [stage.allocated for stage in told] == sorted(stage.allocated for stage in told)
    assert (steady.micro_batch_size, steady.num_steps) == (4, 6)
    assert 0 < steady.step_seconds < 60
    assert steady.samples_per_second == pytest.approx(4 / steady.step_seconds)
    assert steady.execution["layout"] == "packed"


def test_micro_batches_share_the_stages_of_their_passes(few_steps: None) -> None:
    gauge = Counting()
    told, steady = staged("loop.micro_batch_size=1", "techniques.recompute=true", gauge=gauge)
    assert [stage.name for stage in told] == EAGER
    forward, backward = told[4], told[5]
    # context, model, checks and optimizer; then four times both passes, in turn
    assert (forward.allocated, backward.allocated) == (4 + 7, 4 + 8)
    assert steady.micro_batch_size == 1


def test_a_run_that_evaluates_has_a_stage_more(few_steps: None) -> None:
    told, _ = staged("data.splits.validation=0.25", "techniques.packing=false", "optimizer.type=sgd")
    assert [stage.name for stage in told] == [*EAGER, "evaluation"]


def test_the_largest_step_comes_first(few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    accumulate = TorchEngine.accumulate

    def noted(self: Any, given: Any) -> Any:
        seen.append(max(self._collate(ids).inputs["input_ids"].numel() for ids in given.microbatches))
        return accumulate(self, given)

    monkeypatch.setattr(TorchEngine, "accumulate", noted)
    monkeypatch.setattr(module, "TIMED_STEPS", 5)
    staged("techniques.packing=false", "loop.micro_batch_size=2")
    first, second, *others = seen
    assert first == second == max(others), "beside the states, and as an epoch has it"
    assert len(set(others)) > 1, "texts of one length would show nothing"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["loop.batch_size=50", "loop.drop_last=true"], "24 training samples make no whole batch"),
        (["data.max_length=100"], "positions for 64"),
        (["model.config.model_type=birt"], "birt"),
    ],
)
def test_what_train_would_refuse_is_refused(settings: Sequence[str], words: str) -> None:
    with pytest.raises((RecipeError, ModelError), match=words):
        staged(*settings)


# ---- which pass is charged with what


def batch() -> Batch:
    return Batch({"x": torch.zeros(1)}, torch.zeros(1), torch.ones(1))


def test_passes_are_told_apart_while_it_listens() -> None:
    gauge = Counting()
    passes = Passes(lambda model, batch: torch.zeros(1), gauge)
    passes(nn.Identity(), batch())
    assert gauge.count == 0, "steps that are timed wait for nothing"
    found = passes.listen(lambda: [passes(nn.Identity(), batch()) for _ in range(2)])
    assert {name: reading.allocated for name, reading in found.items()} == {"forward": 3, "backward": 4}
    passes(nn.Identity(), batch())
    assert gauge.count == 4


def test_an_error_in_a_pass_tells_which(few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried 2 GiB")

    stages = Stages(NoGauge(), lambda stage: None)
    recipe, _ = choose(Recipe.parse(TINY).with_settings(["techniques.packing=false"]), this_machine())
    monkeypatch.setattr(FlatGradients, "add", fails)
    with pytest.raises(torch.OutOfMemoryError):
        measure_stages(recipe, stages, NoGauge())
    assert stages.now == "backward"


def test_replayed_passes_are_one_stage() -> None:
    assert list(Passes(lambda model, batch: torch.zeros(1), NoGauge()).listen(lambda: None)) == ["passes"]


def test_passes_that_are_being_captured_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_capturing", lambda device: True)
    passes = Passes(lambda model, batch: torch.zeros(1), NoGauge())
    assert list(passes.listen(lambda: passes(nn.Identity(), batch()))) == ["passes"]


def test_a_failing_pass_leaves_it_deaf() -> None:
    gauge = Counting()
    passes = Passes(lambda model, batch: torch.zeros(1), gauge)
    with pytest.raises(ZeroDivisionError):
        passes.listen(lambda: 1 / 0)
    passes(nn.Identity(), batch())
    assert gauge.count == 0


def test_a_stage_of_several_readings_has_its_last_end_and_its_highest() -> None:
    high = Reading(allocated=5, peak=9, reserved=10, in_use=12)
    low = Reading(allocated=4, peak=8, reserved=11, in_use=11)
    assert low.after(high) == Reading(allocated=4, peak=9, reserved=11, in_use=12)
    assert low.after(None) == low


def test_a_gpu_is_read_by_allocator_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    answers: dict[str, Any] = {
        "synchronize": None,
        "max_memory_reserved": 100,
        "memory_reserved": 70,
        "mem_get_info": (800, 1000),
        "memory_allocated": 50,
        "max_memory_allocated": 90,
        "reset_peak_memory_stats": None,
    }

    def answer(name: str) -> Callable[..., Any]:
        def call(device: torch.device) -> Any:
            calls.append(name)
            return answers[name]

        return call

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, answer(name))
    device = torch.device("cuda", 0)
    # 30 were given back since most was reserved, 60 are others'
    assert GpuGauge(device, 60).read() == Reading(allocated=50, peak=90, reserved=100, in_use=170)
    assert (calls[0], calls[-1]) == ("synchronize", "reset_peak_memory_stats")
    assert GpuGauge(device, 900).read().in_use == 100, "others have ended since: it is never less than is reserved"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("GPU-a, 17\nGPU-b, 3\n", 3 * MIB),
        ("GPU-a, 17\n", None),
        ("GPU-b, [N/A]\n", None),
        ("", None),
        (None, None),
    ],
)
def test_what_others_have_of_the_gpu(monkeypatch: pytest.MonkeyPatch, answer: str | None, expected: int | None) -> None:
    monkeypatch.setattr(measuring, "ask", lambda command: answer)
    assert taken_by_others(replace(GPU, uuid="GPU-b")) == expected


# ---- the process that measures


SPEAKS = """
import json, os, signal, sys
request = json.loads(sys.stdin.readline())
stage = dict(name="context", allocated=0, peak=0, reserved=0, in_use=request["others"])
print(json.dumps({"stage": stage}), flush=True)
print("a library's warning", file=sys.stderr)
"""
STEADY = {"micro_batch_size": 2, "num_steps": 6, "step_seconds": 0.5, "samples_per_second": 8.0, "execution": {}}


def spoken(*lines: str, others: int = 7) -> MemoryStages:
    code = SPEAKS + "\n".join(lines)
    return measure(Recipe.parse(TINY), others=others, command=[sys.executable, "-I", "-S", "-c", code])


def test_what_the_process_tells() -> None:
    found = spoken(f"print(json.dumps({{'steady': {STEADY!r}}}), flush=True)")
    assert [stage.in_use for stage in found.stages] == [7]
    assert (found.problem, found.others, found.batch_size, found.micro_batch_size) == ("", 7, 4, 2)
    assert (found.step_seconds, found.samples_per_second, found.num_steps) == (0.5, 8.0, 6)


@pytest.mark.parametrize(
    ("line", "problem", "trace"),
    [
        ("print(json.dumps(dict(out_of_memory='forward', message='tried 2 GiB')))", "'forward': tried 2 GiB", ""),
        ("print(json.dumps(dict(problem='loop = 1\\n  why: x')))", "loop = 1\n  why: x", ""),
        ("print(json.dumps(dict(problem='it failed', traceback='line 3')))", "it failed", "line 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "without an answer (signal 9)", "a library's warning"),
        ("sys.exit(3)", "without an answer (exit code 3)", "a library's warning"),
        ("print('{', end='')", "without an answer (exit code 0)", "a library's warning"),
        ("print('[]')", "without an answer (exit code 0)", "a library's warning"),
    ],
)
def test_a_process_that_stops_keeps_its_stages(line: str, problem: str, trace: str) -> None:
    found = spoken(line)
    assert [stage.name for stage in found.stages] == ["context"]
    assert problem in found.problem
    assert found.traceback.strip() == trace
    assert found.step_seconds is None


def test_a_process_that_reads_nothing_is_no_error_of_ours() -> None:
    found = measure(Recipe.parse(TINY), command=[sys.executable, "-I", "-S", "-c", "raise SystemExit(5)"])
    assert (found.stages, found.micro_batch_size) == ((), 4)
    assert "exit code 5" in found.problem


def test_a_process_that_has_said_all_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ENDING_SECONDS", 0.1)
    found = spoken(f"print(json.dumps({{'steady': {STEADY!r}}}), flush=True)", "import time; time.sleep(600)")
    assert (found.problem, found.step_seconds) == ("", 0.5)


def test_whoever_stops_listening_ends_the_process() -> None:
    """The conftest fails a test that leaves it."""

    def interrupted(stage: StageRecord) -> None:
        raise KeyboardInterrupt

    code = SPEAKS + "import time; time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        measure(Recipe.parse(TINY), others=1, heard=interrupted, command=[sys.executable, "-I", "-S", "-c", code])


# ---- what a plan is compared with


def stage(name: str, allocated: int, peak: int, reserved: int, in_use: int) -> StageRecord:
    return StageRecord(name=name, allocated=allocated, peak=peak, reserved=reserved, in_use=in_use)


def bert(**changes: Any) -> MemoryStages:
    """As BERT-large might take it, in round figures; the states are there from the start."""
    rows = [
        ("context", 0, 0, 2 * MIB, 512 * MIB),
        ("model", 1280 * MIB, 1280 * MIB, 1300 * MIB, 1820 * MIB),
        ("checks", 1281 * MIB, 1281 * MIB, 1302 * MIB, 1824 * MIB),
        ("optimizer", 5120 * MIB, 5130 * MIB, 5200 * MIB, 5724 * MIB),
        ("forward", 8000 * MIB, 8100 * MIB, 8200 * MIB, 8900 * MIB),
        ("backward", 5200 * MIB, 8192 * MIB, 8400 * MIB, 9150 * MIB),
        ("update", 5200 * MIB, 5300 * MIB, 8400 * MIB, 9150 * MIB),
        ("steady", 5200 * MIB, 8192 * MIB, 8400 * MIB, 9150 * MIB),
    ]
    fields: dict[str, Any] = {
        "stages": tuple(stage(*row) for row in rows),
        "others": 0,
        "batch_size": 4,
        "micro_batch_size": 4,
        "num_steps": 128,
        "step_seconds": 0.1,
        "samples_per_second": 40.0,
        "execution": {"steps": "eager: techniques.capture is off"},
    }
    return MemoryStages(**{**fields, **changes})


PHASES = {"model": 1280, "preparation": 1400, "optimizer": 5130, "forward": 8100, "backward": 8110, "update": 5300}


def plan(**changes: Any) -> MemoryPlan:
    fields: dict[str, Any] = {
        "allocated": 8110 * MIB,
        "reserved": 8400 * MIB,
        "context": 800 * MIB,
        "phases": {name: size * MIB for name, size in PHASES.items()},
    }
    return memory_plan(0, **{**fields, **changes})


def compared(found: MemoryStages) -> dict[str, int | None]:
    return {each.name: figure and figure // MIB for each in found.stages for figure in [predicted(found, each)]}


def test_each_stage_is_compared_with_its_phase() -> None:
    expected = {"context": None, "model": 1280, "checks": None, "optimizer": 5130, "forward": 8100}
    assert compared(bert(plan=plan())) == {**expected, "backward": 8110, "update": 5300, "steady": 8110}
    assert set(compared(bert()).values()) == {None}
    assert compared(bert(plan=plan(moment="preparation")))["checks"] == 1400


def test_first_passes_without_the_states_are_not_compared_with_later_ones() -> None:
    found = bert(plan=plan())
    changed = {"update": 5200 + 2560, "steady": 5200 + 2560}
    grown = [replace(s, allocated=changed[s.name] * MIB) if s.name in changed else s for s in found.stages]
    figures = compared(replace(found, stages=tuple(grown)))
    assert (figures["forward"], figures["backward"], figures["update"], figures["steady"]) == (None, None, 5300, 8110)


def test_replayed_steps_are_compared_where_they_were_captured() -> None:
    rows = [s for s in bert().stages if s.name not in ("forward", "backward")]
    rows[4:4] = [stage("warm-up", 0, 8100 * MIB, 0, 0), stage("passes", 0, 5200 * MIB, 0, 0)]
    figures = compared(bert(stages=tuple(rows), plan=plan()))
    assert (figures["warm-up"], figures["passes"], figures["steady"]) == (8110, None, None)
    eager = compared(bert(stages=(*bert().stages, stage("warm-up", 0, 1, 1, 1)), plan=plan()))
    assert eager["warm-up"] is None, "an eager warm-up compiles"


# ---- the ladder


def climb(
    changes: Sequence[str] = (),
    found: Callable[[Recipe], MemoryStages] = lambda recipe: bert(),
    traced: Callable[[Recipe], MemoryPlan] = lambda recipe: plan(),
    progress: Callable[[str], None] = lambda text: None,
) -> Anatomy:
    def measure(recipe: Recipe, heard: Callable[[StageRecord], None]) -> MemoryStages:
        result = found(recipe)
        for each in result.stages:
            heard(each)
        return result

    recipe = Recipe.parse({**TINY, "device": "auto"})
    return measured(ladder(recipe, changes), GPU, WITH_GPU, measure, traced, progress=progress)


def test_each_rung_adds_to_those_before() -> None:
    rungs = ladder(Recipe.parse(TINY), ["loop.micro_batch_size=1", "techniques.recompute=true  optimizer.lr=1e-4"])
    assert [settings for settings, _ in rungs] == [
        (),
        ("loop.micro_batch_size=1",),
        ("loop.micro_batch_size=1", "techniques.recompute=true", "optimizer.lr=1e-4"),
    ]
    last = rungs[-1][1]
    assert (last.loop.micro_batch_size, last.techniques.recompute, last.optimizer.lr) == (1, True, 1e-4)
    assert rungs[0][1].loop.micro_batch_size is None
    quoted = ladder(Recipe.parse(TINY), ["'data.random.length=[4, 8]'"])
    assert quoted[1][1].data.random.length == (4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "--with ''"),
        ("recompute", "--with 'recompute'"),
        ("a=1 b", "--with 'a=1 b'"),
        ("'a=1", "--with "),
        ("techniques.recompte=true", "unknown key"),
        ("loop.micro_batch_size=many", "loop.micro_batch_size"),
    ],
)
def test_a_change_that_is_none_is_refused_before_anything_is_measured(change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        ladder(Recipe.parse(TINY), ["loop.micro_batch_size=1", change])


SHOWN = """\
tiny on Tesla V100-SXM2-32GB, stage by stage

as it is (4 samples a step)
                   on the GPU      added  allocated      peak  predicted  difference
  context            0.50 GiB  +0.50 GiB   0.00 GiB  0.00 GiB
  model              1.78 GiB  +1.28 GiB   1.25 GiB  1.25 GiB   1.25 GiB       +0.0%
  data and checks    1.78 GiB  +0.00 GiB   1.25 GiB  1.25 GiB
  optimizer          5.59 GiB  +3.81 GiB   5.00 GiB  5.01 GiB   5.01 GiB       +0.0%
  first forward      8.69 GiB  +3.10 GiB   7.81 GiB  7.91 GiB   7.91 GiB       +0.0%
  first backward     8.94 GiB  +0.24 GiB   5.08 GiB  8.00 GiB   7.92 GiB       -1.0%
  first update       8.94 GiB  +0.00 GiB   5.08 GiB  5.18 GiB   5.18 GiB       +0.0%
  steady steps       8.94 GiB  +0.00 GiB   5.08 GiB  8.00 GiB   7.92 GiB       -1.0%

  at the highest        measured  predicted  difference
  allocated by tensors  8.00 GiB   7.92 GiB       -1.0%
  reserved by torch     8.20 GiB   8.20 GiB       +0.0%
  context and kernels   0.73 GiB   0.78 GiB       +6.7%
  on the GPU            8.94 GiB   8.98 GiB       +0.5%
  speed: 100.0 ms a step, 40 samples/s; the recipe's 128 steps would take 12.8 s
"""


def test_one_recipe_as_it_is_shown() -> None:
    assert shown(climb()) == SHOWN


def test_several_stand_side_by_side_and_what_cannot_run_says_why() -> None:
    def found(recipe: Recipe) -> MemoryStages:
        if not recipe.techniques.recompute:
            return bert()
        stopped = bert().stages[:4]
        return bert(stages=stopped, problem="out of memory in the stage 'forward': 2 GiB", step_seconds=None)

    def traced(recipe: Recipe) -> MemoryPlan:
        if recipe.techniques.recompute:
            raise ModelError("the step cannot be traced", "it asks for numbers", "train measures it")
        return plan()

    said: list[str] = []
    changes = ["techniques.recompute=true", "techniques.recompute=false optimizer.type=adamw8bit"]
    anatomy = climb(changes, found, traced, said.append)
    text = shown(anatomy)
    assert "with techniques.recompute=true (4 samples a step)" in text
    assert "  stopped: out of memory in the stage 'forward': 2 GiB" in text
    assert "  not predicted: the step cannot be traced" in text
    assert "  stopped: optimizer.type = adamw8bit\n    why: needs bitsandbytes or torchao" in text
    table = text.partition("side by side\n")[2].splitlines()
    assert [line.split("  ")[1] for line in table[1:]] == [
        "as it is",
        "+ techniques.recompute=true",
        "+ techniques.recompute=false optimizer.type=adamw8bit",
    ]
    assert table[1].split()[3:] == ["8.00", "GiB", "7.92", "GiB", "8.94", "GiB", "8.98", "GiB", "100.0", "40"]
    assert table[2].rstrip().endswith("out of memory in the stage 'forward': 2 GiB")
    assert table[3].rstrip().endswith("adamw8bit: needs bitsandbytes or torchao, and neither is installed")
    assert said[0] == "measuring as it is"
    assert "measuring with techniques.recompute=true: optimizer done" in said
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_micro_batches_others_and_unknowns_are_told() -> None:
    text = shown(climb(found=lambda recipe: bert(micro_batch_size=1, others=3 * GIB)))
    assert "as it is (4 samples a step: 4 micro-batches of 1)" in text
    assert "left out: 3.00 GiB that other programs had of the GPU before" in text
    assert "nvidia-smi did not tell" in shown(climb(found=lambda recipe: bert(others=None)))


def test_the_plan_of_a_bug_is_told_in_a_line() -> None:
    def traced(recipe: Recipe) -> MemoryPlan:
        raise PlanFailed("Traceback ...\n  File x\nKeyError: 'y'\n")

    assert "not predicted: KeyError: 'y'" in shown(climb(traced=traced))


def test_where_nothing_could_be_measured_the_first_reason_is_the_error() -> None:
    nothing = MemoryStages(problem="loop.batch_size = 50\n  why: too many\n  fix: fewer")
    with pytest.raises(UserError) as error:
        climb(found=lambda recipe: nothing)
    assert (str(error.value), error.value.exit_code) == (nothing.problem, 2)
    with pytest.raises(NothingMeasured, match="KeyError") as bug:
        climb(found=lambda recipe: replace(nothing, traceback="KeyError"))
    assert bug.value.exit_code == 1


def test_a_program_gets_bytes() -> None:
    plain = json.loads(json.dumps(climb(["techniques.recompute=true"]).plain()))
    assert (plain["name"], plain["gpu"], len(plain["ladder"])) == ("tiny", GPU.name, 2)
    rung = plain["ladder"][1]
    assert rung["settings"] == ["techniques.recompute=true"]
    assert sum(each["added"] for each in rung["stages"]) == rung["total"] == 9150 * MIB
    assert rung["stages"][5]["predicted_peak"] == rung["plan"]["phases"]["backward"]
    assert rung["plan"]["total"] == 9200 * MIB
    assert (rung["peak"], rung["reserved"], rung["context"]) == (8192 * MIB, 8400 * MIB, 750 * MIB)


# ---- the report


def test_the_page_has_a_stacked_chart_of_each_rung(tmp_path: Path) -> None:
    write(climb(["techniques.recompute=true"]), tmp_path / "deep" / "out")
    html = (tmp_path / "deep" / "out" / "report.html").read_text(encoding="utf-8")
    assert_inert(html)
    assert html.count("<figure") == 2
    text = " ".join(Page(html).text.split())
    for fact in (
        "first backward8.94 GiB+250 MiB5.08 GiB8 GiB7.92 GiB-1.0%",
        "allocated by tensors8 GiB7.92 GiB-1.0%",
        "held at the end: 5.08 GiB",
        "passing: 2.92 GiB",
        "with techniques.recompute=true",
        "100.0 ms a step, 40 samples/s",
    ):
        assert fact in text or fact in html, f"{fact}\n{text}"
    found = json.loads((tmp_path / "deep" / "out" / "memory.json").read_text())
    assert found == climb(["techniques.recompute=true"]).plain() | {"ladder": found["ladder"]}


def test_nothing_in_it_is_obeyed_and_an_empty_rung_has_no_chart() -> None:
    evil = bert(problem=f"{EVIL}\n  why: {EVIL}", plan_problem=EVIL, settings=(EVIL,))
    html = stages_page("x", EVIL, [evil, MemoryStages(problem="no\n  why: GPU")])
    assert_inert(html)
    assert "Stopped: no; why: GPU" in html
    assert html.count("<figure") == 1


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out"):
        write(climb(), tmp_path / "file")
