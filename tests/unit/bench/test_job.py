"""What contenders share computes what paceline computes, by its own code: order, learning rates, weight decay."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from paceline.bench.cells import CONTENDERS
from paceline.bench.rungs import LADDERS, OURS
from paceline.data.order import ShuffledOrder
from paceline.optim.schedule import factors
from paceline.recipe.parts import SchedulePart
from tests.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def shared() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contenders_job", CONTENDERS / "job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_paceline_s(shared: ModuleType, drop_last: bool, shuffle: bool) -> None:
    count, size, steps, seed = 23, 5, 12, 3
    job = {"seed": seed, "steps": steps, "batch_size": size, "shuffle": shuffle, "drop_last": drop_last}
    order = ShuffledOrder(np.arange(count), micro_batch_size=size, shuffle=shuffle, drop_last=drop_last)
    at, expected = _start(seed, size), []
    for _ in range(steps):
        expected.append(order.plan(at).samples.tolist())
        at = order.after(at)
    assert shared.batches(job, count) == expected


def _start(seed: int, size: int) -> Any:
    from paceline.data.order import OrderState

    return OrderState(seed=seed, epoch=0, step=0, batch_size=size)


def test_a_loader_tells_the_size_of_its_batches(shared: ModuleType) -> None:
    """Lightning's strategy for DeepSpeed asks for it, and fails where there is none."""
    loader = shared.loader({"workers": 0}, [0, 1, 2], list, [[2, 0], [1]])
    assert loader.batch_sampler.batch_size == 2
    assert list(loader) == [[2, 0], [1]]


def test_rows_that_make_no_batch_are_told(shared: ModuleType) -> None:
    job = {"seed": 0, "steps": 1, "batch_size": 8, "shuffle": True, "drop_last": True}
    with pytest.raises(SystemExit, match="3 rows make no batch of 8"):
        shared.batches(job, 3)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_paceline_s(shared: ModuleType, kind: str, warmup: int, floor: float) -> None:
    floor = floor if kind != "constant" else 0.0
    expected = factors(SchedulePart(type=kind, warmup=warmup, floor=floor), 20)
    job = {"steps": 20, "schedule": {"type": kind, "warmup": warmup, "floor": floor}}
    assert [shared.rate_factor(job, step) for step in range(20)] == pytest.approx(expected.tolist())


def test_biases_and_norms_do_not_decay(shared: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    part = {"type": "adamw", "lr": 0.1, "weight_decay": 0.5, "betas": [0.8, 0.9], "eps": 1e-6}
    job = {"steps": 2, "optimizer": part, "schedule": {"type": "constant", "warmup": 0, "floor": 0.0}}
    optimizer, _ = shared.make_optimizer(job, model)
    told = {len(group["params"]): group["weight_decay"] for group in optimizer.param_groups}
    assert told == {1: 0.5, 3: 0.0}
    assert optimizer.defaults["betas"] == (0.8, 0.9)


@pytest.fixture
def attention_of_cudnn() -> Iterator[None]:
    """torch's setting, put back afterwards."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(was)


@pytest.mark.usefixtures("attention_of_cudnn")
def test_texts_are_trained_on_without_the_attention_that_is_planned_anew_for_each_width(
    shared: ModuleType, tmp_path: Path
) -> None:
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), ("a good film", "good")])
    job = {"seed": 0, "model": str(write_tiny_model(tmp_path / "model")), "train": str(tmp_path / "train.csv")}
    shared.opened({**job, "labels": {"good": 0, "bad": 1}, "max_length": 8})
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("contender", sorted({rung.contender for rung in LADDERS["text"]} - {OURS}))
def test_every_contender_of_texts_opens_them_alike(contender: str) -> None:
    assert "opened(job)" in (CONTENDERS / f"{contender}.py").read_text()
