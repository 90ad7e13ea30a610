"""Traces that torch.profiler really wrote, of a small loop on the CPU, alone and on two ranks."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from paceline.contract.spans import listening, mark, span
from paceline.observe.profiler_ranges import ProfilerRanges
from paceline.seams import Alone, World
from paceline.tracing import Budgets, Verdict, budget, read_window, told, verdict
from tests.testing.distributed import run_distributed
from tests.unit.tracing.simulated import SETTINGS, Workload, facts_of

# torch 2.11 says so whenever a profiler starts; our own windows must not
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

FIRST, STEPS = 5, 6
SLEEP = 0.15
"""Seconds: many times those of a step, whatever else the machine does."""


def train(world: World, folder: Path, fault: str, rank: int) -> None:
    """A loop of a few steps with a fault on one rank, traced into the folder."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        slow = fault if world.rank == rank else ""
        with span("data wait"):
            time.sleep(SLEEP * (slow == "loader"))
            inputs = torch.randn(64, 256)
        with span("forward"):
            # padded passes are long ones
            time.sleep(SLEEP * (slow in ("forward", "padding")))
            loss = model(inputs).square().mean()
        with span("backward"):
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        with span("communicate"):
            for gradient in gradients:
                world.all_reduce(gradient)
        with span("update"):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        time.sleep(SLEEP * (slow == "loop"))
        mark("made", step=number)

    step(FIRST - 1)  # what is done once is done in it
    with profile(activities=[ProfilerActivity.CPU]) as found, listening(ProfilerRanges()):
        for number in range(FIRST, FIRST + STEPS):
            with span("step", step=number):
                step(number)
            world.any(False)
    folder.mkdir(exist_ok=True)
    plain = folder / f"rank{world.rank}.trace.json"
    found.export_chrome_trace(str(plain))
    with plain.open("rb") as text, gzip.open(f"{plain}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(text, packed)
    padding = 0.8 if fault == "padding" else 0.05
    load = Workload(first_step=FIRST, num_steps=STEPS, world_size=world.size, padding=padding)
    write_facts(folder, world.rank, facts_of(load, world.rank, device="cpu", peak_flops=None))


def write_facts(folder: Path, rank: int, facts: dict[str, Any]) -> None:
    (folder / f"rank{rank}.window.json").write_text(json.dumps(facts))


def judged(folder: Path) -> tuple[Verdict, Budgets]:
    window = read_window(folder)
    budgets = budget(window)
    return verdict(window, budgets), budgets


def check_budgets(budgets: Budgets) -> None:
    for one in budgets.each:
        assert sum(one.seconds.values()) == pytest.approx(one.wall, rel=1e-9)
        # between steps nothing is done, and the machine may be busy with something else
        assert one.seconds["other"] < 0.1 * one.wall + 0.01


@pytest.mark.parametrize(
    ("fault", "bound", "category", "switch"),
    [
        ("loader", "input", "data wait", None),
        ("padding", "padding", "forward", "techniques.packing=true"),
        ("loop", "launch", "host gap", None),
    ],
)
def test_a_fault_of_a_real_loop_is_named(
    fault: str, bound: str, category: str, switch: str | None, tmp_path: Path
) -> None:
    train(Alone(), tmp_path, fault, 0)
    found, budgets = judged(tmp_path)
    check_budgets(budgets)
    assert (found.bound, found.switch and found.switch.text) == (bound, switch)
    if fault != "padding":
        assert budgets.mean(0)[category] >= SLEEP, "a busy machine may sleep for longer"
        assert found.lost == pytest.approx(budgets.mean(0)[category] / budgets.step_seconds, rel=1e-3)


def test_operators_of_a_real_loop_are_told_by_kind(tmp_path: Path) -> None:
    train(Alone(), tmp_path, "", 0)
    found, budgets = judged(tmp_path)
    kinds = dict(found.kinds)
    assert {"matmul", "norm and pointwise"} <= set(kinds)
    # operators nest: counted once each they cannot take longer than the steps
    assert sum(kinds.values()) <= found.step_seconds
    assert any(top.name in ("aten::addmm", "aten::mm") for top in budgets.top)
    assert "aten::" in told(found, budgets)


@pytest.mark.parametrize(
    ("fault", "where", "look_at"), [("loader", "in data wait", "its disk"), ("forward", "in forward", "processor")]
)
def test_a_slow_rank_of_two_is_named(fault: str, where: str, look_at: str, tmp_path: Path) -> None:
    run_distributed(train, 2, tmp_path, fault, 1)
    found, budgets = judged(tmp_path)
    check_budgets(budgets)
    assert (found.bound, found.rank) == ("straggler", 1)
    assert where in found.evidence[1]
    assert look_at in told(found, budgets), "there is no GPU to look at"
    # the fast one waits
    waited = [budgets.mean(rank)["exposed communication"] for rank in (0, 1)]
    assert waited[0] > 0.7 * SLEEP
    assert waited[1] < waited[0] / 2


def test_a_fault_of_both_ranks_is_no_straggler(tmp_path: Path) -> None:
    run_distributed(train_alike, 2, tmp_path)
    found, _ = judged(tmp_path)
    assert (found.bound, found.rank) == ("input", None)


def train_alike(world: World, folder: Path) -> None:
    train(world, folder, "loader", world.rank)


def test_a_compiler_at_work_is_seen(tmp_path: Path) -> None:
    model = nn.Linear(32, 2)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with profile(activities=[ProfilerActivity.CPU]) as found, listening(ProfilerRanges()):
        for number in range(FIRST, FIRST + 3):
            with span("step", step=number), span("forward"):
                compiled(torch.randn(4 * number, 32))
    found.export_chrome_trace(str(tmp_path / "rank0.trace.json.gz"))
    torch._dynamo.reset()
    load = Workload(first_step=FIRST, num_steps=3)
    recompiles = [{"step": step, "reason": "size mismatch at dim 0"} for step in range(FIRST + 1, FIRST + 3)]
    facts = facts_of(load, 0, device="cpu", recompiles=recompiles, settings=SETTINGS | {"techniques.compile": True})
    write_facts(tmp_path, 0, facts)
    judgement, budgets = judged(tmp_path)
    assert (judgement.bound, judgement.switch and judgement.switch.text) == ("recompiles", "techniques.compile=false")
    assert all(0.5 * one.wall < one.compiling <= one.wall for one in budgets.each)
    assert "2 recompiles in 3 steps: size mismatch at dim 0" in judgement.evidence
