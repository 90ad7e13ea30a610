"""Runs under DeepSpeed go on elsewhere, and runs of elsewhere under DeepSpeed; what one rank meets reaches all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from paceline.contract.errors import CheckpointError, UserError
from paceline.seams import Alone, Tensors, World
from paceline.strategies.deepspeed import library
from tests.e2e.full_ranks import by_hand
from tests.e2e.test_out_of_memory import Full
from tests.e2e.whole_runs import recipe
from tests.parity.test_deepspeed import BUILT, CASES, ON_DISK, WITHOUT, Case, assembled, inputs, outcome, small_on_disk
from tests.testing.distributed import run_distributed
from tests.testing.tiny import TEXTS, write_tiny_model

pytestmark = [pytest.mark.deepspeed, WITHOUT]

Saved = tuple[Tensors, dict[str, Any]]

HALF = 5
CASE = Case(batch_size=6, micro_batch_size=2, optimizer=(("lr", 1e-2),))


def first_half(world: World, case: Case, strategy: str) -> Saved:
    run = assembled(world, case, strategy)
    try:
        outcome(world, case, run, HALF)
        tensors, state = run.engine.state()
        return {stem: {name: one.clone() for name, one in named.items()} for stem, named in tensors.items()}, state
    finally:
        run.engine.close()


def second_half(world: World, case: Case, strategy: str, saved: Saved) -> tuple[list[float], dict[str, Tensor]]:
    run = assembled(world, case, strategy)
    try:
        run.engine.load(*saved)
        found = outcome(world, case, run, HALF, first=HALF)
        weights = {name: one.clone() for name, one in run.engine.whole().items()}
        return found.losses, weights
    finally:
        run.engine.close()


def on(ranks: int, function: Any, *arguments: Any) -> Any:
    """What the first rank has of it; one process needs no ranks."""
    return function(Alone(), *arguments) if ranks == 1 else run_distributed(function, ranks, *arguments)[0]


WAYS = {
    "stage 3, then one process": (2, "deepspeed", 3, 1, "auto", 3),
    "one process, then stage 3": (1, "auto", 3, 2, "deepspeed", 3),
    "stage 1, then stage 3": (2, "deepspeed", 1, 2, "deepspeed", 3),
    "stage 3, then ddp": (2, "deepspeed", 3, 2, "ddp", 3),
    "fsdp, then stage 2": (2, "fsdp", 2, 2, "deepspeed", 2),
    "stage 2, then fsdp": (2, "deepspeed", 2, 2, "fsdp", 2),
    "stage 2, then stage 2 on 4 ranks": (2, "deepspeed", 2, 4, "deepspeed", 2),
    "stage 3 in one process, then stage 2": (1, "deepspeed", 3, 2, "deepspeed", 2),
    "stage 2, then stage 3 in one process": (2, "deepspeed", 2, 1, "deepspeed", 3),
    "stage 2 in one process, then ddp": (1, "deepspeed", 2, 2, "ddp", 2),
}


@pytest.fixture(scope="module")
def straight() -> tuple[list[float], dict[str, Tensor]]:
    """Both halves in one process."""
    run = assembled(Alone(), CASE, "auto")
    found = outcome(Alone(), CASE, run, 2 * HALF)
    return found.losses[HALF:], {name: one.clone() for name, one in run.engine.whole().items()}


@pytest.mark.parametrize("offload", ["none", "offloaded"])
@pytest.mark.parametrize("name", WAYS)
def test_a_run_goes_on_on_other_ranks_and_under_other_strategies(
    name: str, offload: str, straight: tuple[list[float], dict[str, Tensor]]
) -> None:
    ranks, before, stage, later_ranks, after, later_stage = WAYS[name]

    def case(of: int) -> Case:
        return replace(CASE, stage=of, offload="optimizer" if offload == "offloaded" else "none")

    saved = on(ranks, first_half, case(stage), before)
    assert saved[1]["applied"] == HALF
    losses, weights = on(later_ranks, second_half, case(later_stage), after, saved)
    expected, trained = straight
    assert losses == pytest.approx(expected, rel=1e-5)
    for tensor, told in trained.items():
        distance = (weights[tensor] - told).abs().max().item()
        assert distance < 5e-5, f"{tensor} differs by {distance}"


def half_on_disk(world: World, half: Any, case: Case, strategy: str, *saved: Saved) -> Any:
    with small_on_disk():
        return half(world, case, strategy, *saved)


@ON_DISK
@BUILT
@pytest.mark.parametrize(
    ("ranks", "before", "later_ranks", "after"),
    [
        (2, "deepspeed", 2, "deepspeed"),
        (2, "deepspeed", 2, "ddp"),
        (2, "fsdp", 2, "deepspeed"),
        (1, "auto", 2, "deepspeed"),
        (2, "deepspeed", 1, "deepspeed"),
    ],
)
def test_a_run_whose_states_are_on_a_disk_goes_on_elsewhere(
    ranks: int,
    before: str,
    later_ranks: int,
    after: str,
    straight: tuple[list[float], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    case = replace(CASE, stage=3, offload="optimizer", folder=str(tmp_path))
    saved = on(ranks, half_on_disk, first_half, case, before)
    assert saved[1]["applied"] == HALF
    losses, weights = on(later_ranks, half_on_disk, second_half, case, after, saved)
    expected, trained = straight
    assert losses == pytest.approx(expected, rel=1e-5)
    for tensor, told in trained.items():
        distance = (weights[tensor] - told).abs().max().item()
        assert distance < 5e-5, f"{tensor} differs by {distance}"


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "imdb_distilbert_deepspeed.yaml"


def write_reviews(path: Path) -> Path:
    rows = [{"text": f"{TEXTS[at % 4]} number {at}", "label": ("fine", "dull")[at % 2]} for at in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def typed(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("processes", "stage", "later"), [(1, 2, 2), (2, 3, 1)])
def test_the_recipe_runs_goes_on_elsewhere_and_is_evaluated(
    processes: int, stage: int, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # beside accelerate, transformers loads DeepSpeed for the tiny model, which sets this and leaves it
    monkeypatch.setenv(library.NVML, "0")
    model, data, run = write_tiny_model(tmp_path / "tiny"), write_reviews(tmp_path / "reviews.jsonl"), tmp_path / "run"
    settings = ["loop.max_steps=2", "loop.batch_size=6", "loop.micro_batch_size=2", "loop.checkpoint_every=2"]
    settings += ["data.max_length=16", "observe.report=false", f"parallel.stage={stage}", "device=cpu"]
    sets = [part for setting in settings for part in ("--set", setting)]
    typed("train", RECIPE, "--model", model, "--data", data, "--out", run, "--processes", str(processes), *sets)
    assert f"ZeRO stage {stage}" in json.loads((run / "summary.json").read_text())["execution"]["parallel"]
    typed("train", run, "--resume", "--processes", str(later), "--set", "loop.max_steps=4")
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    typed("evaluate", run, "--data", data)


def loading(world: World, stage: int, saved: Saved) -> list[str]:
    run = assembled(world, Case(stage), "deepspeed")
    told = []
    try:
        for stem in ("model", "optimizer"):
            tensors = {one: dict(named) for one, named in saved[0].items()}
            tensors[stem].pop(next(iter(tensors[stem])))
            with pytest.raises(CheckpointError) as caught:
                run.engine.load(tensors, saved[1])
            told.append(str(caught.value))
        return told
    finally:
        run.engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_another_model_is_refused(stage: int) -> None:
    saved = first_half(Alone(), CASE, "auto")
    for told in run_distributed(loading, 2, stage, saved):
        assert "the model in the checkpoint is not this run's" in told[0]
        assert "the optimizer in the checkpoint is not this run's" in told[1]


def overflowing(world: World, case: Case) -> tuple[list[bool], int, list[float]]:
    """Three steps, of which the second is infinite on the last rank alone."""
    run = assembled(world, case, "deepspeed")
    finite, sums = [], []
    collate = run.build.layout.collate
    try:
        for step, given in enumerate(inputs(case, world, 3)):
            if step == 1 and world.rank == world.size - 1:
                run.engine._collate = lambda *args, **more: _infinite(collate(*args, **more))
            run.engine.accumulate(given)
            run.engine._collate = collate
            finite.append(bool(run.engine.update().finite))
            whole = run.engine.whole()
            sums.append(sum(one.double().abs().sum().item() for one in whole.values()))
        return finite, run.engine.state()[1]["applied"], sums
    finally:
        run.engine.close()


def _infinite(batch: Any) -> Any:
    return replace(batch, weights=batch.weights * torch.inf)


@pytest.mark.parametrize("name", ["stage 1", "stage 3", "stage 2, optimizer offloaded", "stage 3, fp16"])
def test_what_is_infinite_on_one_rank_is_skipped_by_all(name: str) -> None:
    for rank, (finite, applied, sums) in enumerate(run_distributed(overflowing, 2, CASES[name])):
        assert finite == [True, False, True]
        assert applied == 2
        if rank == 0:
            assert sums[0] == sums[1] != sums[2]


def misused(world: World) -> list[str]:
    run = assembled(world, Case(2), "deepspeed")
    given = next(inputs(Case(2), world))
    told = []
    try:
        with pytest.raises(UserError) as early:
            run.engine.update()
        told.append(str(early.value))
        run.engine.accumulate(given)
        with pytest.raises(UserError) as twice:
            run.engine.accumulate(given)
        return [*told, str(twice.value)]
    finally:
        run.engine.close()


def test_an_update_takes_one_accumulation() -> None:
    for early, twice in run_distributed(misused, 2):
        assert "there are no gradients to apply" in early
        assert "have summed those gradients already" in twice


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"kind": "step"') if path.exists() else 0


@pytest.mark.timeout(400)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.NVML, "0")
    model, data, run = write_tiny_model(tmp_path / "tiny"), write_reviews(tmp_path / "reviews.jsonl"), tmp_path / "run"
    settings = ["loop.max_steps=100000", "loop.epochs=100000", "loop.batch_size=6", "loop.checkpoint_every=never"]
    settings += ["loop.evaluate_every=never", "loop.save_best=false", "parallel.stage=2", "device=cpu"]
    settings += ["data.max_length=16", "observe.report=false"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "paceline", "train", RECIPE, "--model", model, "--data", data, "--out", run]
    with subprocess.Popen(
        [*map(str, command), "--processes", "2", *sets],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            ends = time.monotonic() + 200
            while steps_of(run) < 3 and running.poll() is None and time.monotonic() < ends:
                time.sleep(0.05)
            os.kill(ranks_of(running.pid)[-1], signal.SIGTERM)
            told, _ = running.communicate(timeout=100)
        finally:
            running.kill()
    assert running.returncode == 75, told
    assert "stopped by SIGTERM to rank 1" in (run / "preempted").read_text(encoding="utf-8")
    done = steps_of(run)
    typed("train", run, "--resume", "--processes", "2", "--set", f"loop.max_steps={done + 2}")
    assert json.loads((run / "summary.json").read_text())["steps"] == done + 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "in_backward"), [(2, True), (3, False)])
def test_a_full_rank_ends_all_and_what_it_advises_goes_on(
    stage: int, in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.NVML, "0")
    model, data = write_tiny_model(tmp_path / "tiny"), write_reviews(tmp_path / "reviews.jsonl")
    parallel = {"strategy": "deepspeed", "stage": stage}
    chosen = recipe(model, data, loop={"max_steps": 6, "checkpoint_every": 1}, parallel=parallel)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()), encoding="utf-8")
    full = Full(most=1, rank=1, from_step=3, in_backward=in_backward)
    failed, other = by_hand(tmp_path, full, ["train", "recipe.yaml", "--out", "run"])
    what = f"out of memory in the {'back' if in_backward else 'for'}ward pass of step 3 of 6: "
    for done in (failed, other):
        assert done.code == 2, done.errors
        assert "Traceback" not in done.errors
        assert "fix: --set loop.micro_batch_size=2" in done.errors
        assert "on_oom" not in done.errors, "a change is advised that is refused here"
    assert f"paceline: rank 1: {what}" in failed.errors
    assert f"paceline: rank 1 failed: {what}" in other.errors
    assert other.ended - failed.ended < 30
    settings = ("--set", "loop.micro_batch_size=2")
    typed("train", tmp_path / "run", "--resume", "--processes", "2", *settings)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6
