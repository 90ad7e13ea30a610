"""Traces of a GPU: what was launched where, and faults that were planted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from paceline.contract.spans import listening, span
from paceline.observe.profiler_ranges import ProfilerRanges
from paceline.tracing import Budgets, Verdict, budget, read_window, verdict
from tests.unit.tracing.simulated import SETTINGS, Workload, facts_of

# torch 2.11 says so wherever a profile begins
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

FIRST, STEPS = 3, 6
LOAD = Workload(first_step=FIRST, num_steps=STEPS, facts={"peak_flops": None})


def judged(folder: Path, step: Callable[[], None], **facts: object) -> tuple[Verdict, Budgets]:
    """The verdict on steps of a GPU, after two that nobody looks at."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found, listening(ProfilerRanges()):
        for number in range(FIRST, FIRST + STEPS):
            with span("step", step=number):
                step()
        torch.cuda.synchronize()
    found.export_chrome_trace(str(folder / "rank0.trace.json.gz"))
    (folder / "rank0.window.json").write_text(json.dumps(facts_of(LOAD, 0, **facts)))
    window = read_window(folder)
    budgets = budget(window)
    for one in budgets.each:
        assert sum(one.seconds.values()) == pytest.approx(one.wall, rel=1e-6)
    return verdict(window, budgets), budgets


def stepping(width: int, layers: int, loading: float = 0.0) -> Callable[[], None]:
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rows = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    # little to copy: what a link carries differs by machine
    shift = torch.randn(width, dtype=torch.bfloat16).pin_memory()

    def step() -> None:
        with span("data wait"):
            time.sleep(loading)
            with span("copy"):
                moved = shift.to("cuda", non_blocking=True)
        with span("forward"):
            loss = model(rows + moved).float().square().mean()
        with span("backward"):
            optimizer.zero_grad()
            loss.backward()
        with span("update"):
            optimizer.step()

    return step


def test_kernels_belong_to_the_span_that_launched_them_and_a_busy_gpu_is_fine(tmp_path: Path) -> None:
    found, budgets = judged(tmp_path, stepping(8192, 8))
    mean = budgets.mean(0)
    # autograd launches from a thread of its own; two products for each of the forward pass
    assert 1.5 < mean["backward"] / mean["forward"] < 3
    assert mean["clip + update"] > 0
    assert mean["other"] < 0.02 * budgets.step_seconds
    assert dict(found.kinds)["matmul"] > 0.5 * budgets.step_seconds
    assert found.bound is None, found


def test_a_loader_that_sleeps_is_the_input(tmp_path: Path) -> None:
    found, budgets = judged(tmp_path, stepping(1024, 4, loading=0.05))
    assert (found.bound, found.switch and found.switch.text) == ("input", "data.resident=true")
    assert budgets.mean(0)["data wait"] == pytest.approx(0.05, rel=0.2)


def test_tiny_kernels_wait_for_their_launches(tmp_path: Path) -> None:
    found, budgets = judged(tmp_path, stepping(64, 100))
    assert (found.bound, found.switch and found.switch.text) == ("launch", "techniques.capture=true")
    assert budgets.mean(0)["host gap"] > 0.3 * budgets.step_seconds


def test_a_replayed_graph_is_cut_into_its_passes(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to("cuda", torch.bfloat16)
    batch, labels = (
        torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16),
        torch.zeros(4096, device="cuda").long(),
    )

    def passes() -> None:
        model.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(batch).float(), labels).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        passes()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    _, budgets = judged(tmp_path, graph.replay, graphs="replayed", settings=SETTINGS | {"techniques.capture": True})
    mean = budgets.mean(0)
    assert 1.2 < mean["backward"] / mean["forward"] < 3.5
    assert mean["forward"] + mean["backward"] > 0.8 * budgets.step_seconds
