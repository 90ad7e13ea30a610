"""A sample alone in its micro-batch: refused before the first step exactly where torch would refuse it within one."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.image_layout import ImageLayout
from paceline.data.order import OrderState, ShuffledOrder
from paceline.engine.statistics import check_smallest, fewest_together, running_statistics
from paceline.recipe.parts import LoopPart, TaskPart
from paceline.seams import Build
from paceline.tasks import task_for

SAMPLES = 60


def build_of(model: nn.Module) -> Build:
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 4, 4, 1), dtype=np.uint8)
    labels = np.arange(SAMPLES) % 3
    cpu = torch.device("cpu")
    return Build(
        model=model.train(),
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=ImageLayout(Images(pixels), labels, cpu, mean=(0.5,), deviation=(0.5,)),
        task=task_for("classification", ("a", "b", "c"), TaskPart()),
        device=cpu,
    )


def normed(positions: int, *, kept: bool = True) -> nn.Module:
    """Batch normalisation over so many positions a side of each image."""
    norm = nn.BatchNorm2d(2, track_running_stats=kept)
    return nn.Sequential(nn.Conv2d(1, 2, 5 - positions), norm, nn.Flatten(), nn.LazyLinear(3))


def order_of(part: LoopPart, samples: int) -> ShuffledOrder:
    micro = part.micro_batch_size or part.batch_size
    return ShuffledOrder(np.arange(samples), micro_batch_size=micro, drop_last=part.drop_last, fewest=2)


def check(build: Build, part: LoopPart, samples: int, world_size: int, total_steps: int | None = None) -> None:
    order = order_of(part, samples)
    total = total_steps or order.steps_per_epoch(part.batch_size)
    check_smallest(build, order, part, np.arange(samples), total_steps=total, world_size=world_size)


def trained(build: Build) -> Build:
    """After a pass, which settles the shape of the last layer."""
    build.forward(build.model, build.layout.collate(np.arange(4)))
    return build


def torch_refuses(build: Build, num_samples: int) -> bool:
    try:
        build.forward(build.model, build.layout.collate(np.arange(num_samples)))
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def sizes_of(part: LoopPart, samples: int, world_size: int) -> set[int]:
    """Of all micro-batches of an epoch, on all ranks."""
    order, sizes = order_of(part, samples), set[int]()
    at = OrderState(seed=0, epoch=0, step=0, batch_size=part.batch_size)
    for _ in range(order.steps_per_epoch(part.batch_size)):
        sizes |= {len(ids) for ids in order.of_all_ranks(at, world_size)}
        at = order.after(at)
    return sizes


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_refused_is_what_torch_would_refuse(positions: int, world_size: int) -> None:
    build = trained(build_of(normed(positions)))
    refuses = [torch_refuses(build, size) for size in range(17)]
    assert refuses == [False, positions == 1] + [False] * 15
    for samples, micro in itertools.product(range(world_size, 34), (None, 1, 2, 3, 5)):
        for batch_size in {world_size, 2 * world_size, 9, 16}:
            part, message = LoopPart(batch_size=batch_size, micro_batch_size=micro), ""
            try:
                check(build, part, samples, world_size)
            except RecipeError as error:
                message = str(error)
            expected = any(refuses[size] for size in sizes_of(part, samples, world_size))
            told = f"{samples} samples on {world_size} ranks with {part}"
            assert bool(message) == expected, f"torch {'fails on' if expected else 'trains'} {told}: {message}"


@pytest.mark.parametrize("seed", range(12))
def test_what_is_advised_works(seed: int) -> None:
    build, draw = trained(build_of(normed(1))), np.random.default_rng(seed)
    for _ in range(12):
        world_size = int(draw.integers(1, 6))
        samples, batch_size = int(draw.integers(max(2, world_size), 60)), int(draw.integers(world_size, 20))
        micro = int(draw.integers(1, batch_size + 1))
        settings: dict[str, Any] = {"batch_size": batch_size, "micro_batch_size": micro}
        for _ in range(4):  # one at a time
            try:
                check(build, LoopPart(**settings), samples, world_size)
                break
            except RecipeError as error:
                name, value = re.match(r"--set loop\.(\w+)=(\w+)", error.fix).groups()  # type: ignore[union-attr]
                settings[name] = value == "true" if name == "drop_last" else int(value)
                if order_of(LoopPart(**settings), samples).steps_per_epoch(settings["batch_size"]) == 0:
                    break  # the run says so
        else:
            pytest.fail(f"still refused after {settings}, {samples} samples, {world_size} ranks")


@pytest.mark.parametrize(
    ("settings", "samples", "world_size", "message"),
    [
        ({"batch_size": 4}, 40, 4, r"loop\.batch_size = 4: 4 processes\n  why: .*\(1\).* by itself.*\n  fix: "
         r"--set loop\.batch_size=8 or more, or start 2 processes or fewer$"),
        ({"batch_size": 3}, 40, 2, r"loop\.batch_size = 3: 2 processes\n.*\n  fix: --set loop\.batch_size=4 or more, "
         r"or start 1 process$"),
        ({"batch_size": 1}, 40, 1, r"loop\.batch_size = 1\n.*\n  fix: --set loop\.batch_size=2$"),
        ({"batch_size": 8}, 41, 4, r"the last batch of an epoch has 1 of 41 .*\n  fix: --set loop\.drop_last=true$"),
        ({"batch_size": 8, "micro_batch_size": 1}, 40, 1, r"size = 8, loop\.micro_batch_size = 1\n.*\n  fix: "
         r"--set loop\.micro_batch_size=2$"),
        ({"batch_size": 7, "micro_batch_size": 3}, 40, 1, r"fix: --set loop\.micro_batch_size=4$"),
        ({"batch_size": 8}, 1, 1, r"fix: give more data$"),
    ],
)  # fmt: skip
def test_the_message_names_the_layer_and_a_setting(
    settings: dict[str, Any], samples: int, world_size: int, message: str
) -> None:
    build = trained(build_of(normed(1)))
    with pytest.raises(RecipeError, match=message):
        check(build, LoopPart(**settings), samples, world_size)


def test_a_last_batch_that_the_run_does_not_reach_is_no_reason() -> None:
    build = trained(build_of(normed(1)))
    part = LoopPart(batch_size=8)
    check(build, part, 41, 2, total_steps=5)
    with pytest.raises(RecipeError, match="last batch"):
        check(build, part, 41, 2, total_steps=6)
    check(build, LoopPart(batch_size=8, drop_last=True), 41, 2)


def test_without_kept_statistics_it_is_no_different() -> None:
    build = trained(build_of(normed(1, kept=False)))
    with pytest.raises(RecipeError, match="by itself"):
        check(build, LoopPart(batch_size=4), 40, 4)


def test_looking_changes_nothing() -> None:
    build = trained(build_of(normed(1)))
    before = [tensor.clone() for tensor in build.model.state_dict().values()]
    generator = torch.get_rng_state()
    with pytest.raises(RecipeError):
        check(build, LoopPart(batch_size=4), 40, 4)
    assert all(map(torch.equal, before, build.model.state_dict().values()))
    assert torch.equal(generator, torch.get_rng_state())
    assert build.model.training
    assert not any(module._forward_pre_hooks for module in build.model.modules())
    assert len(running_statistics(build.model)) == 3


def test_a_model_without_batch_normalisation_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_of(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    monkeypatch.setattr("paceline.engine.statistics.inference", lambda _: pytest.fail("it was run"))
    check(build, LoopPart(batch_size=4), 41, 4)


def test_ranks_get_two_where_a_batch_is_normalised() -> None:
    norms = (nn.BatchNorm1d(2), nn.BatchNorm2d(2, track_running_stats=False), nn.SyncBatchNorm(2), nn.LayerNorm(2))
    assert [fewest_together(nn.Sequential(nn.ReLU(), norm)) for norm in norms] == [2, 2, 2, 1]
