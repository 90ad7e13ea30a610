"""What listens in a window, by itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import UserError
from paceline.contract.spans import Sink, span
from paceline.observe import nvtx_ranges
from paceline.tracing import listeners
from paceline.tracing.listeners import KinetoListener, NsysListener, add_memory_counters

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Ranges(Sink):
    """What the tool would be told."""

    def __init__(self, title: Any, diary: list[str]) -> None:
        self.title, self.diary = title, diary

    def begin(self, name: str, step: int | None) -> None:
        self.diary.append(self.title(name, step))

    def end(self, name: str) -> None:
        self.diary.append("end")

    def mark(self, name: str, step: int | None) -> None:
        self.diary.append(self.title(name, step))


def steps(number: int) -> None:
    with span("step", step=number):
        for name in ("data wait", "forward", "backward", "clip", "update"):
            with span(name):
                pass


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches NVTX and CUDA's profiler, in order."""
    told: list[str] = []
    monkeypatch.setattr(listeners, "nvtx_ranges", lambda title: Ranges(title, told))

    class Cudart:
        def cudaProfilerStart(self) -> None:
            told.append("cudaProfilerStart")

        def cudaProfilerStop(self) -> None:
            told.append("cudaProfilerStop")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    return told


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_ranges_have_the_names_of_a_hand_written_loop(device: torch.device, diary: list[str]) -> None:
    listener = NsysListener(device, lambda step: (3, step - 20))
    steps(21)
    listener.prepare()
    listener.start()
    steps(22)
    listener.stop()
    steps(23)
    inner = [["Data Wait"], ["Forward"], ["Backward"], ["Clip"], ["Optimizer Step"]]
    within = ["Epoch 3, Iteration 2", *(told for name in inner for told in (*name, "end")), "end"]
    assert diary == (["cudaProfilerStart", *within, "cudaProfilerStop"] if device is GPU else within)
    assert bool(listener.remark) == (device is CPU)


def test_without_nvtx_the_error_comes_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> None:
        raise UserError("NVTX ranges", "the package nvtx is not installed", "pip install 'paceline[nvtx]'")

    monkeypatch.setattr(nvtx_ranges, "NvtxRanges", missing)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"paceline\[nvtx\]"):
        NsysListener(CPU, lambda step: (1, step))


def test_torchs_own_binding_stands_in_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> None:
        raise UserError("NVTX ranges", "the package nvtx is not installed", "pip install 'paceline[nvtx]'")

    told: list[str] = []
    monkeypatch.setattr(nvtx_ranges, "NvtxRanges", missing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    listener = NsysListener(CPU, lambda step: (1, step))
    listener.start()
    steps(4)
    listener.stop()
    assert told[:3] == ["Epoch 1, Iteration 4", "Data Wait", "end"]
    assert told.count("end") == 6


def test_the_profiler_hears_the_window_and_nothing_else(tmp_path: Path) -> None:
    listener = KinetoListener(CPU, memory=False)
    for window in (2, 5):
        steps(window - 1)
        listener.prepare()
        listener.start()
        steps(window)
        listener.stop()
        steps(window + 1)
        listener.save(tmp_path / f"rank{window}")
        with gzip.open(tmp_path / f"rank{window}.trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert sorted(name for name in named if "step" in name) == [f"paceline: step {window}"]
        assert "paceline: update" in named
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank2.trace.json.gz", "rank5.trace.json.gz"]


def test_memory_becomes_a_curve(tmp_path: Path) -> None:
    def memory(at: float, kind: int, allocated: int) -> dict[str, Any]:
        said = {"Device Type": kind, "Device Id": 0, "Total Allocated": allocated, "Total Reserved": 2 * allocated}
        return {"ph": "i", "name": "[memory]", "pid": 7, "tid": 8, "ts": at, "args": said}

    kept = {"ph": "X", "name": "aten::mm", "ts": 1.0, "dur": 2.0}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [memory(1.0, 0, 10), kept, memory(2.5, 1, 30)]}))
    add_memory_counters(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert kept in events
    assert [event for event in events if event["ph"] == "C"] == [
        {"ph": "C", "name": "memory of host", "pid": 7, "ts": 1.0, "args": {"allocated": 10, "reserved": 20}},
        {"ph": "C", "name": "memory of device 0", "pid": 7, "ts": 2.5, "args": {"allocated": 30, "reserved": 60}},
    ]
