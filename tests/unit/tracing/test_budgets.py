"""Budgets are an exact partition: held against one that looks at every microsecond by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.tracing import CATEGORIES, budget, read_window
from tests.unit.tracing.simulated import ADAM, ALL_REDUCE, COPY_IN, MATMUL, MILLI, Workload, facts_of, write, write_rank

FACTS = Workload(num_steps=3, first_step=4)
NAMES = ("data wait", "copy", "forward", "backward", "communicate", "clip", "update", "evaluate", "checkpoint", "mine")
WORK = (MATMUL, ADAM, ALL_REDUCE, COPY_IN, "Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "something_else")

PLACE = {"clip": "clip + update", "update": "clip + update"}
PASSES = {"forward": "forward", "backward": "backward", "clip + update": "clip + update"}
WHOLE = {"evaluate": "evaluation", "checkpoint": "checkpoint"}


def event(kind: str, name: str, begin: int, end: int, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    times = {"ts": 1e9 + begin, "dur": end - begin}
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, **times, "args": arguments}


def random_spans(dice: random.Random) -> list[tuple[str, int, int]]:
    """Steps, each with parts that nest, and things between them; microseconds, two between any two times."""
    spans, now = [], 10

    def inside(depth: int) -> None:
        nonlocal now
        for _ in range(dice.randrange(4)):
            now += 2 + dice.randrange(20)
            begin, name = now, dice.choice(NAMES)
            now += 2 + dice.randrange(30)
            if depth < 3:
                inside(depth + 1)
            now += 2
            spans.append((name, begin, now))

    for step in (4, 5, 6):
        begin = now
        now += 2
        inside(0)
        now += 2 + dice.randrange(40)
        spans.append((f"step {step}", begin, now))
        now += 2 + dice.randrange(10)
        if dice.random() < 0.4:
            spans.append((dice.choice(["evaluate", "checkpoint"]), now, now + 25))
            now += 30
    return spans


def place_at(spans: list[tuple[str, int, int]], moment: float) -> str:
    """The innermost span that is known there; an evaluation keeps what is inside it."""
    around = sorted((span for span in spans if span[1] <= moment < span[2]), key=lambda span: (span[1], -span[2]))
    place = "outside"
    for name, *_ in around:
        plain = "step" if name.startswith("step") else PLACE.get(name, name)
        if place not in WHOLE and plain != "mine":
            place = plain
    return place


def of_work(name: str, place: str) -> tuple[int, str]:
    """Its turn, and its category."""
    if "Memcpy" in name:
        return 2, WHOLE.get(place, "host to device" if "HtoD" in name else "other")
    if "nccl" in name:
        return 1, WHOLE.get(place, "exposed communication")
    in_data = {"data wait": "host to device", "copy": "host to device", "communicate": "exposed communication"}
    return 0, {**PASSES, **WHOLE, **in_data}.get(place, "other")


IDLE = {"data wait": "data wait", "copy": "data wait", "communicate": "exposed communication", **WHOLE}
ON_CPU = {
    "data wait": "data wait",
    "copy": "host to device",
    "communicate": "exposed communication",
    **PASSES,
    **WHOLE,
    "step": "host gap",
}


@pytest.mark.parametrize("seed", range(40))
def test_every_microsecond_of_a_step_is_in_one_category(seed: int, tmp_path: Path) -> None:
    dice, on_gpu = random.Random(seed), seed % 4 > 0
    spans = random_spans(dice)
    last = max(end for _, _, end in spans)
    work, events = [], [event("user_annotation", f"paceline: {name}", *times) for name, *times in spans]
    for number in range(1, dice.randrange(2, 60) if on_gpu else 1):
        launched = dice.randrange(11, last)
        begin = launched + dice.randrange(1, 60)
        name, end = dice.choice(WORK), begin + dice.randrange(0, 40)
        thread = dice.choice([1, 2])
        events.append(event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, correlation=number))
        kind = {"Memc": "gpu_memcpy", "Mems": "gpu_memset"}.get(name[:4], "kernel")
        events.append(event(kind, name, begin, end, 7, stream=dice.choice([7, 8]), correlation=number))
        work.append((name, begin, end, launched))
    dice.shuffle(events)
    write_rank(tmp_path, 0, events, facts_of(FACTS, 0, device="NVIDIA H200" if work else "cpu"))
    found = budget(read_window(tmp_path))

    begins = sorted(begin for name, begin, _ in spans if name.startswith("step"))
    final = [end for name, begin, end in spans if name.startswith("step") or (name in WHOLE and begin > begins[-1])]
    host = [*begins[1:], max(final)]
    bounds = begins[:1]
    for until in host:
        bounds.append(max([until, bounds[-1], *(end for _, _, end, launched in work if launched < until)]))
    for index, one in enumerate(found.each):
        expected = dict.fromkeys(CATEGORIES, 0)
        for tick in range(bounds[index], bounds[index + 1]):
            running = [of_work(name, place_at(spans, at)) for name, begin, end, at in work if begin <= tick < end]
            first = min((turn for turn, _ in running), default=None)
            there = {category for turn, category in running if turn == first}
            at_host = place_at(spans, tick)
            meant = IDLE.get(at_host, "host gap") if work else ON_CPU.get(at_host, "other")
            expected[min(there, key=CATEGORIES.index) if there else meant] += 1
        assert {name: round(1e6 * spent, 3) for name, spent in one.seconds.items()} == expected, one.step
        assert one.wall == pytest.approx(1e-6 * (bounds[index + 1] - bounds[index]))
        assert sum(one.seconds.values()) == pytest.approx(one.wall, rel=1e-9)
        assert sum(one.gaps.values()) == pytest.approx(one.seconds["host gap"], abs=1e-12)
    assert found.steps == (4, 5, 6)


def test_the_steps_of_a_window_share_its_time_and_leave_none(tmp_path: Path) -> None:
    found = budget(read_window(write(tmp_path, Workload(world_size=2, noise=0.1))))
    for rank in found.ranks:
        whole = sum(one.wall for one in found.of_rank(rank))
        assert whole == pytest.approx(10 * 26 * MILLI, rel=0.05)
        settled = sum(one.wall for one in found.of_rank(rank)[1:])
        assert sum(found.mean(rank).values()) * 9 == pytest.approx(settled, rel=1e-9)
    assert found.step_seconds == pytest.approx(whole / 10, rel=0.01)


def test_what_is_launched_late_in_a_step_ends_it_though_the_host_has_gone_on(tmp_path: Path) -> None:
    found = budget(read_window(write(tmp_path, Workload())))
    # the host of a busy GPU is steps ahead: its own steps would take a millisecond
    assert all(one.wall == pytest.approx(25.8 * MILLI, rel=0.01) for one in found.each)
    assert all(sum(one.host.values()) < 1 * MILLI for one in found.each)


def test_seconds_by_kind_and_by_kernel(tmp_path: Path) -> None:
    found = budget(read_window(write(tmp_path, Workload())))
    one = found.each[3]
    assert one.kinds["matmul"] == pytest.approx(18 * MILLI, rel=1e-3)
    assert one.kinds["attention"] == pytest.approx(5.4 * MILLI, rel=1e-3)
    assert one.kinds["norm and pointwise"] == pytest.approx(1.8 * MILLI, rel=1e-3)
    assert one.kinds["optimizer"] == pytest.approx(0.55 * MILLI, rel=1e-3), "clipping reduces, and is of the update"
    assert (found.top[0].name, found.top[0].kind) == (MATMUL, "matmul")
    assert found.top[0].seconds == pytest.approx(180 * MILLI, rel=1e-3)


def test_a_sum_beside_the_backward_pass_costs_nothing(tmp_path: Path) -> None:
    one = budget(read_window(write(tmp_path, Workload(world_size=2)))).each[5]
    assert one.communication == pytest.approx(1.2 * MILLI, rel=1e-3)
    assert one.seconds["exposed communication"] == pytest.approx(0.3 * MILLI, rel=0.05), "the last one has no company"
    assert one.longest_exposed == pytest.approx(0.3 * MILLI, rel=0.05)
    assert one.reducing == one.communication


def test_fusing_joins_neighbours_of_one_pass(tmp_path: Path) -> None:
    load = Workload(pointwise=(0.1 * MILLI, 0.3 * MILLI, 0.2 * MILLI), layers=2)
    one = budget(read_window(write(tmp_path, load))).each[5]
    # forward: a run a layer; backward: the same, twice as long; the two meet in the middle and stay apart
    assert one.fusible == pytest.approx(2 * (0.3 + 0.6) * MILLI, rel=1e-3)
    assert budget(read_window(write(tmp_path, replace(load, pointwise=(0.1 * MILLI,))))).each[5].fusible == 0
