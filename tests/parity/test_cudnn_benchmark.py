"""When cuDNN is told to try its kernels. What it finds is tried on GPUs: tests/gpu/test_capture.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.engine.numerics import numerics
from paceline.seams import Batch
from paceline.techniques import cudnn_benchmark
from paceline.techniques.cudnn_benchmark import ALL, apply_cudnn_benchmark
from tests.parity.driving import assembled, recipe
from tests.parity.reference import tiny_model
from tests.parity.test_fully_connected import build_of

cudnn = torch.backends.cudnn


@pytest.fixture(autouse=True)
def as_before() -> object:
    with numerics("fp32", deterministic=False):
        yield
    assert cudnn.benchmark is False


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.LazyLinear(3))


def test_it_is_told_so_before_a_training_pass_of_the_largest_batch_and_until_the_next_pass() -> None:
    seen = []

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((cudnn.benchmark, len(batch.labels)))
        return model(batch.inputs["pixel_values"])

    build = build_of(network(), 2)
    told, model, collate = apply_cudnn_benchmark(forward), build.model.train(), build.layout.collate
    for rows in (4, 8, 5, 8):
        told(model, collate(np.arange(rows))).sum().backward()
    assert cudnn.benchmark is True, "of the backward pass, too"
    told(model.eval(), collate(np.arange(8)))
    with torch.no_grad():
        told(model.train(), collate(np.arange(8)))
    told(model, collate(np.arange(8)))
    assert seen == [(True, 4), (True, 8), (False, 5), (True, 8), (False, 8), (False, 8), (True, 8)]
    if torch.backends.cuda.is_built():
        assert cudnn.benchmark_limit == ALL


def test_what_a_run_leaves_is_put_back() -> None:
    before = cudnn.benchmark, cudnn.benchmark_limit
    with numerics("fp32", deterministic=False):
        cudnn.benchmark, cudnn.benchmark_limit = True, 3
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before


def test_a_run_that_asks_for_it_says_so_and_a_model_without_convolutions_is_refused() -> None:
    build = build_of(network(), 2)
    told = cudnn_benchmark.apply(build)
    assert told.forward is not build.forward
    assert told.execution["cudnn_benchmark"] == "in training"
    with pytest.raises(RecipeError, match=r"--set techniques\.cudnn_benchmark=false"):
        cudnn_benchmark.apply(assembled(tiny_model(), recipe()).build)
