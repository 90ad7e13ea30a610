"""The moving average of the weights in captured steps: the bits of eager ones, and nothing that waits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.engine.torch_engine import TorchEngine
from paceline.optim.ema import EMA
from paceline.prepare.assemble import Assembled
from tests.gpu.test_capture import made, step
from tests.gpu.waiting import waits_are_errors


def average_of(run: Assembled) -> EMA:
    assert isinstance(run.engine, TorchEngine)
    assert run.engine.ema is not None
    return run.engine.ema


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("settings", [{}, {"warmup": True, "every": 3}])
def test_captured_steps_keep_the_average_of_eager_ones(mode: str, kind: str, settings: dict[str, object]) -> None:
    ema = {"decay": 0.8, **settings}
    (eager, _), (captured, _) = made(False, mode, type=kind, ema=ema), made(True, mode, type=kind, ema=ema)
    for index in range(20):
        step(eager, index)
        step(captured, index)
    assert captured.engine.execution["steps"].startswith("captured"), captured.engine.execution
    one, other = average_of(eager), average_of(captured)
    assert one.updates == other.updates > 15
    assert all(map(torch.equal, one.shadow, other.shadow))
    # not "any": a bias of keys has a gradient of zero, and SGD leaves it where it was
    assert not all(map(torch.equal, other.shadow, other.parameters)), "the average is the weights themselves"


def test_the_average_is_torchs() -> None:
    run, _ = made(True, "fp32", ema=0.8)
    ema = average_of(run)
    plain = copy.deepcopy(run.build.model)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for index in range(12):
        step(run, index)
        plain.load_state_dict(run.build.model.state_dict())
        average.update_parameters(plain)
    names = {parameter: name for name, parameter in run.build.model.named_parameters()}
    for parameter, shadow in zip(ema.parameters, ema.shadow, strict=True):
        torch.testing.assert_close(shadow, average.module.get_parameter(names[parameter]).detach())


def test_an_overflow_under_replay_moves_no_average() -> None:
    run, _ = made(True, "fp16", ema=0.8)
    for index in range(6):
        step(run, index)
    ema = average_of(run)
    before, updates = [shadow.clone() for shadow in ema.shadow], ema.updates
    layout = run.build.layout
    bad = layout.collate(np.arange(5))
    bad.inputs["pixel_values"].fill_(float("inf"))
    run.engine.accumulate_batches([bad, layout.collate(np.arange(5, 8))], 8, step=6)
    assert not run.engine.update().finite
    assert ema.updates == updates
    assert all(map(torch.equal, before, ema.shadow))


def test_nothing_waits_and_evaluating_the_average_leaves_the_graphs_as_they_are() -> None:
    (plain, _), (run, _) = made(True, ema=0.8), made(True, ema=0.8)
    for index in range(12):
        step(plain, index)
        step(run, index)
    with waits_are_errors():
        step(plain, 12)
        step(run, 12)
    averaged = run.engine.averaged()
    assert averaged is not None
    with averaged:
        run.engine.infer(run.build.layout.collate(np.arange(8)))
    for index in range(13, 18):
        assert torch.equal(step(plain, index)[0], step(run, index)[0]), index
    assert all(map(torch.equal, average_of(plain).shadow, average_of(run).shadow))
