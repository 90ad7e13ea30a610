"""Planted faults are named, with what their switch wins back; clean runs stay quiet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.recipe import Recipe
from paceline.tracing import SETTINGS, Budgets, Verdict, budget, compared, measured_gain, read_window, verdict
from tests.unit.tracing.simulated import (
    MILLI,
    Workload,
    seconds,
    write,
)
from tests.unit.tracing.simulated import SETTINGS as OFF


def judged(folder: Path, load: Workload) -> tuple[Verdict, Budgets]:
    window = read_window(write(folder, load))
    budgets = budget(window)
    return verdict(window, budgets), budgets


def settings(**changes: Any) -> dict[str, Any]:
    return {"settings": OFF | {name.replace("__", "."): value for name, value in changes.items()}}


def of_rank(rank: int, wanted: float) -> Callable[[int, int], float]:
    return lambda own, step: wanted if own == rank else 0.0


RECOMPILES = [{"step": step, "reason": "size mismatch at dim 0"} for step in range(91, 101)]

TINY = Workload(
    matmul=0.003 * MILLI,
    attention=0.002 * MILLI,
    pointwise=(0.002 * MILLI,) * 6,
    update=0.005 * MILLI,
    launch=0.008 * MILLI,
    layers=24,
)
NARROW = Workload(matmul=0.2 * MILLI, attention=0.1 * MILLI, pointwise=tuple(x * MILLI for x in (0.3, 0.25, 0.3, 0.28)))
SLOW_LINK = Workload(world_size=2, sum_seconds=7 * MILLI)
PADDED = Workload(padding=0.8)
IN_FP32 = Workload(matmul=14 * MILLI, attention=4 * MILLI, facts=settings(techniques__precision="fp32"))

# name, the fault, the same without it, the bound, its switch
PLANTED = (
    ("loaders", Workload(loading=lambda rank, step: 45 * MILLI), Workload(), "input", "data.resident=true"),
    ("tiny kernels", TINY, replace(TINY, replayed=True), "launch", "techniques.capture=true"),
    (
        "many small kernels that read and write the same",
        NARROW,
        replace(NARROW, pointwise=(0.3 * MILLI,)),
        "memory bandwidth",
        "techniques.compile=true",
    ),
    (
        "fp32",
        IN_FP32,
        replace(IN_FP32, matmul=14 * MILLI * 67 / 989, attention=4 * MILLI * 67 / 989, pointwise=(0.05 * MILLI,)),
        "compute",
        "techniques.precision=bf16",
    ),
    (
        "slow link",
        SLOW_LINK,
        replace(SLOW_LINK, sum_seconds=3.5 * MILLI),
        "communication",
        "parallel.reduce_dtype=bf16",
    ),
    (
        "80 % padding",
        PADDED,
        replace(PADDED, matmul=0.2 * MILLI, attention=0.06 * MILLI, pointwise=(0.02 * MILLI,)),
        "padding",
        "techniques.packing=true",
    ),
    (
        "a new shape each step",
        Workload(
            compiling=lambda rank, step: 200 * MILLI,
            facts={"recompiles": RECOMPILES, **settings(techniques__compile=True)},
        ),
        Workload(),
        "recompiles",
        "techniques.compile=false",
    ),
)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("load", "without", "bound", "switch"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_named_with_what_its_switch_wins(
    load: Workload, without: Workload, bound: str, switch: str, noise: float, tmp_path: Path
) -> None:
    found, _ = judged(tmp_path, replace(load, noise=noise))
    assert (found.bound, found.switch and found.switch.text) == (bound, switch)
    truth = 1 - seconds(without) / seconds(load)
    assert truth > 0.2
    assert found.gain == pytest.approx(truth, rel=0.3)


SLOW = (
    ("its loader", {"loading": of_rank(1, 40 * MILLI)}, "in data wait"),
    ("its forward", {"in_forward": of_rank(1, 40 * MILLI)}, "waiting for its host in forward"),
    ("its GPU", {"slowness": lambda rank, step: 1.4 if rank == 1 else 1.0}, "in backward"),
)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("fault", "where"), [each[1:] for each in SLOW], ids=[each[0] for each in SLOW])
def test_a_straggler_is_the_rank_that_does_not_wait(
    fault: dict[str, Any], where: str, noise: float, world_size: int, tmp_path: Path
) -> None:
    fine = Workload(world_size=world_size)
    found, budgets = judged(tmp_path, replace(fine, noise=noise, **fault))
    assert (found.bound, found.rank, found.switch) == ("straggler", 1, None)
    assert where in " ".join(found.evidence)
    waited = {rank: budgets.mean(rank)["exposed communication"] for rank in budgets.ranks}
    assert min(waited, key=waited.__getitem__) == 1, "the one that waits least is the last to arrive"
    assert found.lost == pytest.approx(1 - seconds(fine) / seconds(replace(fine, **fault)), rel=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_run_stays_quiet(seed: int, tmp_path: Path) -> None:
    load = Workload(world_size=(1, 2, 4)[seed % 3], noise=0.05, seed=seed, replayed=seed % 4 == 3)
    found, budgets = judged(tmp_path, load)
    assert (found.bound, found.switch, found.others) == (None, None, ())
    assert found.mfu is not None
    assert 0.4 < found.mfu < found.roofline < 0.6  # type: ignore[operator]
    for one in budgets.each:
        assert sum(one.seconds.values()) == pytest.approx(one.wall, rel=1e-9)


def test_ranks_that_take_turns_are_no_stragglers(tmp_path: Path) -> None:
    slowness = lambda rank, step: 1.3 if (step + rank) % 2 else 1.0  # noqa: E731
    found, _ = judged(tmp_path, Workload(world_size=2, slowness=slowness))
    assert found.bound != "straggler"


def test_a_rank_with_more_to_compute_is_told_apart_from_a_slow_one(tmp_path: Path) -> None:
    load = Workload(world_size=2, slowness=lambda rank, step: 1.4 if rank == 1 else 1.0)
    folder = write(tmp_path, load)
    path = folder / "rank1.window.json"
    path.write_text(path.read_text().replace('"slots": 16384', '"slots": 22938'))
    window = read_window(folder)
    assert "40% more positions" in " ".join(verdict(window, budget(window)).evidence)


def test_the_largest_bound_comes_first_and_the_others_after_it(tmp_path: Path) -> None:
    found, _ = judged(tmp_path, replace(PADDED, loading=lambda rank, step: 120 * MILLI))
    assert found.bound == "input"
    assert [bound for bound, _ in found.others] == ["padding"]


def test_launching_in_a_window_what_the_run_replays_is_not_held_against_it(tmp_path: Path) -> None:
    on = settings(techniques__capture=True)
    found, budgets = judged(tmp_path, replace(TINY, facts={"graphs": "launched", **on}))
    assert found.bound != "launch"
    assert found.added_seconds == pytest.approx(budgets.mean(0)["host gap"], rel=0.1)
    # without its gaps the step is as long as a replayed one
    left = found.step_seconds - found.added_seconds
    assert left == pytest.approx(seconds(replace(TINY, replayed=True)), rel=0.15)


def test_a_replay_is_cut_into_passes_and_update(tmp_path: Path) -> None:
    (_, launched), (_, replayed) = (judged(tmp_path / str(on), Workload(replayed=on)) for on in (False, True))
    for name in ("forward", "backward", "clip + update"):
        assert replayed.mean(0)[name] == pytest.approx(launched.mean(0)[name], rel=0.05), name


@pytest.mark.parametrize(
    ("load", "name", "value"),
    [
        (Workload(loading=lambda rank, step: 45 * MILLI), "data.resident", True),
        (PADDED, "techniques.packing", True),
        (SLOW_LINK, "parallel.reduce_dtype", "bf16"),
    ],
    ids=["input", "padding", "communication"],
)
def test_a_switch_that_is_on_already_is_not_offered(load: Workload, name: str, value: Any, tmp_path: Path) -> None:
    found, _ = judged(tmp_path, replace(load, facts={"settings": OFF | {name: value}}))
    assert (found.switch, found.gain) == (None, 0.0)
    assert found.bound
    assert found.advice


def test_nothing_is_offered_to_a_loop_without_a_recipe(tmp_path: Path) -> None:
    for index, (_, load, *_rest) in enumerate(PLANTED):
        found, _ = judged(tmp_path / str(index), replace(load, facts={**load.facts, "settings": {}}))
        assert found.switch is None, found


def test_smaller_micro_batches_than_fit_are_joined(tmp_path: Path) -> None:
    small = settings(techniques__capture=True, loop__micro_batch_size=4)
    found, _ = judged(tmp_path, replace(TINY, facts=small))
    assert found.switch
    assert found.switch.text == "loop.micro_batch_size=8"
    assert 0 < found.gain < found.lost


def test_matrix_products_far_below_the_peak_are_a_bound(tmp_path: Path) -> None:
    assert judged(tmp_path / "poor", Workload(facts={"peak_flops": 5e15}))[0].bound == "compute"
    assert judged(tmp_path / "unknown", Workload(facts={"peak_flops": None}))[0].bound is None


def test_steps_of_little_but_memory_traffic_are_told_even_without_a_switch(tmp_path: Path) -> None:
    load = replace(NARROW, pointwise=(0.8 * MILLI,))
    found, _ = judged(tmp_path, load)
    assert (found.bound, found.switch) == ("memory bandwidth", None)


def test_recompiles_without_a_trace_of_the_compiler_are_reckoned_by_the_other_steps(tmp_path: Path) -> None:
    load = Workload(
        in_forward=lambda rank, step: 200 * MILLI if step == 92 else 0.0,
        facts={"recompiles": RECOMPILES[1:2], **settings(techniques__compile=True)},
    )
    found, _ = judged(tmp_path, load)
    assert found.bound == "recompiles"
    assert found.gain == pytest.approx(174 / (174 + 9 * 25.8), rel=0.1)


def test_what_a_switch_has_won_is_told_beside_its_prediction(tmp_path: Path) -> None:
    found, before = judged(tmp_path / "before", PADDED)
    _, after = judged(tmp_path / "after", PLANTED[5][2])
    assert measured_gain(before, after) == pytest.approx(found.gain, rel=0.1)
    text = compared(before, after, found)
    assert text.startswith("with techniques.packing=true a step took 25.8 ms and takes 5.59 ms")
    assert "78% won back; predicted were 81%" in text
    assert "slower" in compared(after, before, found)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_switch_is_a_setting_that_there_is(name: str) -> None:
    part: Any = Recipe
    *parts, field = name.split(".")
    for one in parts:
        part = part.model_fields[one].annotation
        assert issubclass(part, BaseModel)
    assert field in part.model_fields


def test_a_capture_that_was_tried_is_measured_without_the_launches_of_its_window(tmp_path: Path) -> None:
    found, before = judged(tmp_path / "before", TINY)
    # the second run replays, and its window launches
    _, after = judged(
        tmp_path / "after", replace(TINY, facts={"graphs": "launched", **settings(techniques__capture=True)})
    )
    assert found.gain == pytest.approx(measured_gain(before, after), rel=0.1)


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (TINY, {"parallel.strategy": "dp"}),
        (TINY, {"techniques.recompute": True}),
        (TINY, {"parallel.offload": True}),
        (PADDED, {"parallel.strategy": "dp"}),
        (NARROW, {"techniques.compile": True, "techniques.precision": "fp32"}),
    ],
    ids=["dp", "recompute", "offload", "packing under dp", "fusion in fp32"],
)
def test_what_the_recipe_would_refuse_is_not_offered(load: Workload, changes: dict[str, Any], tmp_path: Path) -> None:
    device = {"device": "a GPU that nobody knows"}
    found, _ = judged(tmp_path, replace(load, facts={**device, "settings": OFF | changes}))
    assert found.bound
    assert found.switch is None, found.switch


def test_packing_that_was_found_to_change_gradients_is_not_offered_again(tmp_path: Path) -> None:
    path = {"layout": "padded: DeBERTa has an attention of its own"}
    found, _ = judged(tmp_path, replace(PADDED, facts={"path": path}))
    assert (found.bound, found.switch) == ("padding", None)
    assert "rows are padded, as DeBERTa has an attention of its own" in found.evidence


def test_a_switch_that_wins_next_to_nothing_is_not_offered(tmp_path: Path) -> None:
    # what takes the time is waiting in a question, of which no sum is part
    load = replace(SLOW_LINK, sum_seconds=0.1 * MILLI, update=0.1 * MILLI)
    folder = write(tmp_path, load)
    window = read_window(folder)
    budgets = budget(window)
    waiting = tuple(
        replace(one, wall=2 * one.wall, seconds={**one.seconds, "exposed communication": one.wall})
        for one in budgets.each
    )
    found = verdict(window, replace(budgets, each=waiting))
    assert (found.bound, found.switch, found.gain) == ("communication", None, 0.0)
