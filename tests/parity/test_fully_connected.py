"""A convolution that puts out one pixel and the matrix product over the pixels it sees are one function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.seams import Build
from paceline.tasks import task_for
from paceline.techniques import fully_connected
from paceline.techniques.fully_connected import apply_fully_connected
from tests.parity.driving import recipe

ONE_PIXEL: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "a pixel amid padding": ({"kernel_size": 3, "padding": 1}, (1, 1)),
    "four pixels, one step": ({"kernel_size": 3, "padding": 1, "stride": 2}, (2, 2)),
    "one of four pixels": ({"kernel_size": 1, "stride": 2}, (2, 2)),
    "all of its pixels, and padding on one side": ({"kernel_size": (2, 3), "padding": (0, 1)}, (2, 1)),
    "more padding below than above": ({"kernel_size": 4, "padding": 1}, (2, 2)),
    "a dilated kernel": ({"kernel_size": 3, "dilation": 2, "padding": 1}, (3, 3)),
    "a dilated kernel that meets one pixel": ({"kernel_size": 3, "dilation": 2, "padding": 2}, (1, 1)),
    "sides that differ": ({"kernel_size": (1, 3), "padding": (0, 1), "bias": False}, (1, 1)),
}


def pair(options: dict[str, Any], memory: torch.memory_format) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Two equal layers in fp64, so that what differs is not rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Conv2d(5, 7, **options).double().to(memory_format=memory)
    ours = nn.Conv2d(5, 7, **options).double().to(memory_format=memory)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def images(side: tuple[int, int], memory: torch.memory_format) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(4, 5, *side, generator=generator, dtype=torch.float64)
    return given.contiguous(memory_format=memory).requires_grad_()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ONE_PIXEL)
def test_results_and_all_gradients_are_those_of_the_convolution(name: str, memory: torch.memory_format) -> None:
    options, side = ONE_PIXEL[name]
    plain, ours = pair(options, memory)
    assert apply_fully_connected(ours, (5, *side)) == [""]
    given, same = images(side, memory), images(side, memory)
    expected, found = plain(given), ours(same)
    assert found.shape == (4, 7, 1, 1)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(same.grad, given.grad)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_gradients_lie_in_memory_as_channels_last_weights_do() -> None:
    """Else each would be copied by a kernel of its own into the buffer of all gradients."""
    _, ours = pair({"kernel_size": 3, "padding": 1}, torch.channels_last)
    apply_fully_connected(ours, (5, 1, 1))
    (gradient,) = torch.autograd.grad(ours(images((1, 1), torch.channels_last)).sum(), [ours.weight])
    assert gradient.stride() == ours.weight.stride()


@pytest.mark.parametrize(
    ("layer", "side"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), (2, 1)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), (1, 1)),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (1, 1)),
        (nn.Conv2d(4, 4, 3, padding="same"), (1, 1)),
        (nn.Conv2d(4, 4, 2, padding=1, dilation=2), (1, 1)),
        (nn.Linear(1, 4), (1, 1)),
        (nn.Conv2d(4, 4, 1), (1, 1)),
        (nn.Conv2d(4, 4, (2, 3)), (2, 3)),
    ],
    ids=[
        *("two pixels", "groups", "circular padding", "padding by name", "meets no pixel at all", "no convolution"),
        *("squeezed and excited: nothing is left out", "all of its pixels: nothing is left out"),
    ],
)
def test_others_are_left_alone(layer: nn.Module, side: tuple[int, int]) -> None:
    assert apply_fully_connected(nn.Sequential(layer), (4, *side)) == []
    assert "forward" not in vars(layer)


def test_images_of_another_size_are_convolved_as_before() -> None:
    plain, ours = pair({"kernel_size": 3, "padding": 1}, torch.contiguous_format)
    apply_fully_connected(ours, (5, 1, 1))
    larger = images((4, 3), torch.contiguous_format)
    assert torch.equal(ours(larger), plain(larger))


def test_looking_changes_nothing_in_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_fully_connected(model, (3, 1, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model[0]._forward_pre_hooks


def test_what_a_forward_pass_keeps_stays_its_own() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.grid = nn.Conv2d(3, 4, 3, padding=1), None

        def forward(self, given: Tensor) -> Tensor:
            if self.grid is None:
                self.grid = torch.ones(1, device=given.device)
            out: Tensor = self.layer(input=given) * self.grid
            return out

    model = Keeps()
    assert apply_fully_connected(model, (3, 1, 1)) == ["layer"]
    assert model.grid is None
    assert model(torch.ones(2, 3, 1, 1)).shape == (2, 4, 1, 1)


class Picky(nn.Module):
    """Looks at values, as a pass without data has none; or at what they are kept in."""

    def __init__(self, *, says_so: bool = False) -> None:
        super().__init__()
        self.layer, self.says_so = nn.Conv2d(3, 4, 3, padding=1), says_so

    def forward(self, given: Tensor) -> Tensor:
        if self.says_so and given.device.type == "meta":
            raise ValueError("no such device")
        out: Tensor = self.layer(given) if given.sum().item() > 0 else given
        return out


def build_of(model: nn.Module, side: int) -> Build:
    generator = np.random.default_rng(0)
    pixels = Images(generator.integers(0, 256, (8, side, side, 3), dtype=np.uint8))
    cpu = torch.device("cpu")
    layout = ImageLayout(pixels, generator.integers(0, 3, 8), cpu, mean=(0.5,) * 3, deviation=(0.5,) * 3)
    task = task_for("classification", ("a", "b", "c"), recipe().task)
    return Build(model=model, forward=lambda m, b: m(b.inputs["pixel_values"]), layout=layout, task=task, device=cpu)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), Picky(), Picky(says_so=True)],
    ids=["larger", "looks at values", "says so"],
)
def test_where_there_is_none_auto_says_so_and_true_is_refused(model: nn.Module) -> None:
    build = build_of(model, 2)
    told = fully_connected.apply(build, "auto", (2, 2, 3))
    assert told.decisions[-1].value == "false"
    assert "single pixel" in told.decisions[-1].reason
    assert "fully_connected" not in told.execution
    for shape in ((2, 2, 3), None):
        with pytest.raises(RecipeError, match=r"--set techniques\.fully_connected=auto"):
            fully_connected.apply(build, True, shape)
    assert fully_connected.apply(build, False, (2, 2, 3)) is build
    assert fully_connected.apply(build, "auto", None) is build, "of texts nothing needs to be said"


def test_what_is_found_is_told() -> None:
    def model() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 3)
        return nn.Sequential(*layers)

    build = build_of(model(), 2)
    told = fully_connected.apply(build, "auto", (2, 2, 3))
    assert told.execution["fully_connected"] == "2 convolutions"
    assert told.decisions[-1].value == "true"
    assert fully_connected.apply(build_of(model(), 2), True, (2, 2, 3)).decisions == ()
