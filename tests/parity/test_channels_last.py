"""Channels last is another order in memory and the same network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.seams import Batch, Build
from paceline.tasks import task_for
from paceline.techniques import channels_last
from tests.parity.driving import assembled, recipe
from tests.parity.reference import tiny_model

CPU = torch.device("cpu")


def network() -> nn.Module:
    """Convolutions with batch normalisation, a pooling and a head; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(16, 3)),
        )


def build_of(model: nn.Module) -> Build:
    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (32, 10, 10, 3), dtype=np.uint8))
    layout = ImageLayout(images, generator.integers(0, 3, 32), CPU, mean=(0.5,) * 3, deviation=(0.5,) * 3)
    task = task_for("classification", ("a", "b", "c"), recipe().task)
    return Build(model=model, forward=lambda m, b: m(b.inputs["pixel_values"]), layout=layout, task=task, device=CPU)


def train(build: Build, steps: int = 10) -> list[float]:
    optimizer = torch.optim.SGD(build.model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        batch = build.layout.collate((np.arange(8) + 8 * step) % 32)
        loss = F.cross_entropy(build.forward(build.model, batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ten_steps_are_those_of_the_default_order_up_to_rounding() -> None:
    plain, changed = network(), network()
    expected = train(build_of(plain))
    assert train(channels_last.apply(build_of(changed), True)) == pytest.approx(expected, rel=1e-4)
    for (name, one), (other_name, other) in zip(plain.state_dict().items(), changed.state_dict().items(), strict=True):
        assert name == other_name
        assert one.shape == other.shape
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_weights_images_and_activations_are_channels_last() -> None:
    model, seen = network(), []
    for layer in (model[0], model[4]):
        layer.register_forward_hook(lambda layer, args, out: seen.extend([args[0], layer.weight, out]))
    build = channels_last.apply(build_of(model), "auto")
    build.forward(build.model, build.layout.collate(np.arange(4)))
    assert len(seen) == 6
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)
    assert build.execution["channels_last"] == "on"


def test_a_batch_that_is_channels_last_already_is_not_copied() -> None:
    build, seen = build_of(network()), []

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(batch.inputs["pixel_values"].data_ptr())
        return model(batch.inputs["pixel_values"])

    build = channels_last.apply(replace(build, forward=forward), True)
    batch = build.layout.collate(np.arange(4))
    images = batch.inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    build.forward(build.model, replace(batch, inputs={"pixel_values": images}))
    assert seen == [images.data_ptr()]


def test_a_model_of_texts_is_left_alone_and_true_is_refused() -> None:
    build = assembled(tiny_model(), recipe()).build
    told = channels_last.apply(build, "auto")
    assert told.forward is build.forward
    assert told.decisions[-1].value == "false"
    assert "no convolution" in told.decisions[-1].reason
    assert channels_last.apply(build, False).execution["channels_last"] == "off"
    with pytest.raises(RecipeError, match=r"--set techniques\.channels_last=auto"):
        channels_last.apply(build, True)
