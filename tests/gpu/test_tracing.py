"""Windows on a GPU: kernels in every step, also of steps that are captured otherwise; and what spans cost unheard."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file

from paceline.contract.spans import Sink, listening, span
from paceline.observe.stream_names import name_streams
from paceline.recipe import Recipe
from paceline.verbs.train import train
from tests.testing.tiny import tiny_bert_config
from tests.unit.observe.nvtx_tool import built_tool, heard, nested

MOST_SHARE = 0.003
"""Of a step's seconds, what its spans may take where nobody listens."""

BEHIND = 50_000_000
"""Cycles of a GPU's clock, some 30 ms, by which each step keeps it busy after the host is done."""


def recipe(*settings: str) -> Recipe:
    plain = {
        "model": {"config": tiny_bert_config(hidden_dropout_prob=0.1)},
        "data": {
            "source": "builtin:random",
            "random": {"samples": 512, "length": 12, "vocabulary": 1000},
            "splits": {"validation": 32, "test": 0},
            "max_length": 16,
        },
        "techniques": {"compile": False, "capture": True},
        "loop": {"epochs": 1, "max_steps": 24, "batch_size": 16, "checkpoint_every": "never"},
        "observe": {"console": "off", "report": False, "memory_plan": False},
        "deterministic": True,
    }
    return Recipe.parse(plain).with_settings(settings)


def read(window: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    meta = json.loads((window / "rank0.window.json").read_text())
    with gzip.open(window / "rank0.trace.json.gz") as file:
        return meta, json.load(file)["traceEvents"]


def launched(events: list[dict[str, Any]]) -> dict[int, list[str]]:
    """By step, the kernels whose launch lies within its span."""
    steps = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("paceline: step "):
            steps[int(event["name"].split()[-1])] = (event["ts"], event["ts"] + event["dur"])
    kernels: dict[int, list[str]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            kernels.setdefault(event["args"]["correlation"], []).append(event["name"])
    found: dict[int, list[str]] = {step: [] for step in steps}
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        for step, (begin, end) in steps.items():
            if begin <= event["ts"] <= end:
                found[step] += kernels.get(event.get("args", {}).get("correlation"), [])
    return found


@pytest.mark.parametrize("graph", ["launch", "keep"])
def test_every_step_of_a_window_has_its_kernels(graph: str, tmp_path: Path) -> None:
    plain = train(recipe(), out=tmp_path / "plain")
    watched = train(recipe("trace.steps=[12:16]", f"trace.graph={graph}"), out=tmp_path / "watched")
    meta, events = read(tmp_path / "watched" / "trace" / "steps-13-16")
    kernels = launched(events)
    assert sorted(kernels) == [13, 14, 15, 16]
    assert all(len(names) > 20 for names in kernels.values()), {step: len(names) for step, names in kernels.items()}
    replays = [event for event in events if "GraphLaunch" in event.get("name", "")]
    assert bool(replays) == (graph == "keep")
    assert meta["graphs"] == ("replayed" if graph == "keep" else "launched")
    assert meta["device"] == torch.cuda.get_device_name()
    assert meta["step_seconds_before"] > 0
    # what is captured outlives the window, and no bit is another
    assert watched.execution["steps"] == plain.execution["steps"]
    assert watched.execution["steps"].startswith("captured")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "watched"))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert any("ms before it" in notice for notice in watched.notices)


def test_memory_leaves_a_curve_and_a_snapshot(tmp_path: Path) -> None:
    train(recipe("trace.steps=[12:14]", "trace.memory=true"), out=tmp_path / "run")
    window = tmp_path / "run" / "trace" / "steps-13-14"
    _, events = read(window)
    assert [event for event in events if event["ph"] == "C" and event["name"] == "memory of device 0"]
    assert (window / "rank0.memory.pickle").stat().st_size > 1000


def test_cudas_profiler_runs_in_the_window_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops when the device has ended what was launched in the window, however far that is behind the host."""
    diary: list[str] = []
    cudart: Any = torch.cuda.cudart()

    class Watched:
        def __getattr__(self, name: str) -> Any:  # torch asks it for the GPU's free memory too
            return getattr(cudart, name)

        def cudaProfilerStart(self) -> Any:
            diary.append("start")
            return cudart.cudaProfilerStart()

        def cudaProfilerStop(self) -> Any:
            diary.append("stop" if torch.cuda.current_stream().query() else "stop while it works")
            return cudart.cudaProfilerStop()

    @final
    class Steps(Sink):
        def begin(self, name: str, step: int | None) -> None:
            if name == "step":
                diary.append(str(step))

        def end(self, name: str) -> None:
            if name == "step":
                torch.cuda._sleep(BEHIND)

        def mark(self, name: str, step: int | None) -> None: ...

    monkeypatch.setattr(torch.cuda, "cudart", Watched)
    with listening(Steps()):
        train(recipe("trace.steps=[4:6, 8:9]", "trace.kind=nsys", "loop.max_steps=10"), out=tmp_path / "run")
    assert diary == [*"1234", "start", "5", "6", "stop", "7", "8", "start", "9", "stop", "10"]


COMMAND = """
import sys
from paceline.verbs.cli import main
sys.argv = ["paceline", "train", *sys.argv[1:]]
main()
"""


def test_a_tool_hears_the_ranges_of_eager_steps(tmp_path: Path) -> None:
    """Of replayed ones it would hear none: host ranges fire when a graph is captured."""
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    tool, file = built_tool(tmp_path), tmp_path / "recipe.yaml"
    file.write_text(recipe("trace.steps=[20:23]", "trace.kind=nsys").to_yaml())
    command = [sys.executable, "-c", COMMAND, str(file), "--out", str(tmp_path / "run")]
    events = heard(command, tool, tmp_path, domain=None, timeout=300)
    tree = nested([event for event in events if event["domain"] == "paceline"])
    for iteration in (21, 22, 23):
        inside = [names[1] for names in tree if names[0] == f"Epoch 1, Iteration {iteration}" and len(names) == 2]
        assert [name for name in inside if name != "Data Wait"] == ["Forward", "Backward", "Clip", "Optimizer Step"]
    assert not [names for names in tree if names[0] == "Epoch 1, Iteration 20"]
    if name_streams({1: "other"}):  # where torch's build has brought NVIDIA's library
        assert "capture" in [event["name"] for event in events if event["kind"] == "stream"]


@final
class Count(Sink):
    """Spans and steps."""

    def __init__(self) -> None:
        self.spans = self.steps = 0

    def begin(self, name: str, step: int | None) -> None:
        self.spans += 1
        self.steps += name == "step"

    def end(self, name: str) -> None: ...

    def mark(self, name: str, step: int | None) -> None: ...


def test_spans_that_nobody_hears_cost_nothing_to_speak_of(tmp_path: Path) -> None:
    """Beside a step of DistilBERT on short texts; longer ones, and larger models, take longer and have as many."""
    usual = ["model.config={model_type: distilbert}", "data.random.length=128", "data.max_length=128"]
    usual += ["loop.batch_size=32", "loop.epochs=20"]
    count = Count()
    with listening(count):
        train(recipe(*usual), out=tmp_path / "counted")
    a_step = count.spans / count.steps
    record = train(recipe(*usual, "loop.max_steps=300"), out=tmp_path / "run")
    step_seconds = record.seconds["train"] / record.steps
    began, many = time.perf_counter(), 200_000
    for _ in range(many):
        with span("forward"):
            pass
    each = (time.perf_counter() - began) / many
    share = a_step * each / step_seconds
    assert share < MOST_SHARE, f"{a_step:.1f} spans of {each * 1e9:.0f} ns in a step of {step_seconds * 1e3:.2f} ms"
