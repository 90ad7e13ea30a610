"""The moving average of the weights beside torch's own: ``AveragedModel`` in a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.engine.torch_engine import TorchEngine
from paceline.optim.ema import EMA
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import STEPS, tiny_model, train_by_hand

DECAY = 0.9


class Averaging(torch.optim.AdamW):
    """AdamW, after every ``every`` steps of which an AveragedModel takes in the weights."""

    def __init__(self, model: nn.Module, average: AveragedModel, every: int = 1) -> None:
        super().__init__(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
        self._averaged, self._average, self._every, self._steps = model, average, every, 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self._steps += 1
        if self._steps % self._every == 0:
            self._average.update_parameters(self._averaged)


def warmed_up(shadow: list[Tensor], weights: list[Tensor], averaged: int) -> None:
    """TensorFlow's warm-up, as it stands in its documentation."""
    decay = min(DECAY, (1 + averaged) / (10 + averaged))
    for mean, weight in zip(shadow, weights, strict=True):
        mean.copy_(decay * mean + (1 - decay) * weight)


def by_hand(every: int, average_fn: Callable[..., None]) -> tuple[nn.Module, dict[str, Tensor]]:
    """The trained model and torch's average of it, by parameter."""
    model = tiny_model()
    average = AveragedModel(model, multi_avg_fn=average_fn, use_buffers=False)
    train_by_hand(model, make_optimizer=lambda found: Averaging(found, average, every))
    return model, dict(average.module.named_parameters())


def ours(**settings: Any) -> tuple[nn.Module, TorchEngine]:
    chosen = recipe(optimizer={"ema": {"decay": DECAY, **settings}})
    model = tiny_model()
    run = assembled(model, chosen)
    train(run, chosen)
    assert isinstance(run.engine, TorchEngine)
    return model, run.engine


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_that_of_torch(every: int, warmup: bool) -> None:
    plain, expected = by_hand(every, warmed_up if warmup else get_ema_multi_avg_fn(DECAY))
    model, engine = ours(every=every, warmup=warmup)
    assert engine.ema is not None
    assert engine.ema.updates == STEPS
    names = {parameter: name for name, parameter in model.named_parameters()}
    moved = 0
    for parameter, shadow in zip(engine.ema.parameters, engine.ema.shadow, strict=True):
        name = names[parameter]
        assert torch.equal(parameter, plain.get_parameter(name)), f"{name} was trained otherwise"
        torch.testing.assert_close(shadow, expected[name].detach(), rtol=1e-6, atol=1e-8, msg=name)
        moved += not torch.equal(shadow, parameter)
    assert moved > 20, "the average is the weights themselves: this test saw nothing"


def test_from_the_start_the_average_is_a_plain_loops() -> None:
    """The first update averages with the weights before it, where torch's AveragedModel replaces them."""
    start = {name: weight.detach().clone() for name, weight in tiny_model().named_parameters()}

    class Plain(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for name, weight in by_hand_model.named_parameters():
                start[name] = (1 - DECAY) * weight.detach() + DECAY * start[name]

    by_hand_model = tiny_model()
    train_by_hand(
        by_hand_model,
        make_optimizer=lambda found: Plain(found.parameters(), lr=1e-3, weight_decay=0.01, foreach=False),
    )
    model, engine = ours(from_start=True)
    assert engine.ema is not None
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, shadow in zip(engine.ema.parameters, engine.ema.shadow, strict=True):
        torch.testing.assert_close(shadow, start[names[parameter]], rtol=1e-6, atol=1e-8)


def test_training_is_that_without_an_average() -> None:
    chosen, plain = recipe(), tiny_model()
    losses = train(assembled(plain, chosen), chosen)
    averaged, model = recipe(optimizer={"ema": {"decay": DECAY}}), tiny_model()
    assert train(assembled(model, averaged), averaged) == losses
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name


def test_the_average_in_a_loop_that_adopted_the_step() -> None:
    """Beside the same loop in plain torch."""
    torch.manual_seed(0)
    model, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    ema = EMA(model, decay=DECAY)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def loss_sum(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")

    engine = paceline.adopt(model, optimizer, loss_sum, ema=ema)
    for _ in range(12):
        batch = torch.randn(4, 5), torch.randint(3, (4,))
        engine.accumulate([batch], denominator=4)
        engine.update()
        (loss_sum(plain, batch) / 4).backward()
        other.step()
        other.zero_grad()
        average.update_parameters(plain)
    trained = model.weight.detach().clone()
    with ema.averaged():
        torch.testing.assert_close(model.weight, average.module.weight, rtol=1e-6, atol=1e-7)
        assert not torch.equal(model.weight, trained)
    assert torch.equal(model.weight, trained)
