"""Images gathered, changed and normalised in one pass.

On a CPU the operator is made of torch's own. The kernel runs here only under ``TRITON_INTERPRET=1`` (slow, no GPU
needed), by the same tests; tests/gpu runs it on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.kernels.images import images

pytestmark = [
    # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

HEIGHT, WIDTH = 10, 12
MEAN, DEVIATION = torch.tensor([0.5, 0.4, 0.3]).view(-1, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(-1, 1, 1)
AS_THEY_ARE = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)


def pixels(count: int = 7, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, HEIGHT, WIDTH, channels), generator=generator).to(torch.uint8)


def drawn(samples: int, crop: int, flip: bool, cutout: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    most = (1 + flip, 2 * crop + 1, 2 * crop + 1, HEIGHT if cutout else 1, WIDTH if cutout else 1)
    return torch.stack([torch.randint(0, each, (samples,), generator=generator) for each in most])


def by_hand(given: Tensor, draws: Tensor | None, crop: int, cutout: int) -> Tensor:
    """One image and one pixel after the other."""
    found = torch.zeros(len(given), given.shape[3], HEIGHT, WIDTH)
    for sample, image in enumerate(given):
        mirrored, top, left, row, column = draws[:, sample].tolist() if draws is not None else (0, crop, crop, 0, 0)
        bordered = np.pad(image.numpy(), ((crop, crop), (crop, crop), (0, 0)))
        window = bordered[top : top + HEIGHT, left : left + WIDTH]
        window = window[:, ::-1] if mirrored else window
        values = (torch.from_numpy(window.copy()).permute(2, 0, 1).float() / 255 - MEAN) / DEVIATION
        if cutout and draws is not None:
            up, before = row - cutout // 2, column - cutout // 2
            values[:, max(up, 0) : up + cutout, max(before, 0) : before + cutout] = 0
        found[sample] = values
    return found


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("gathered", [False, True], ids=["all", "by id"])
@pytest.mark.parametrize(
    ("crop", "flip", "cutout"),
    [(0, False, 0), (3, False, 0), (0, True, 0), (0, False, 5), (2, True, 4), (9, True, 9)],
)
def test_every_float_is_that_of_a_loop_over_images(
    crop: int, flip: bool, cutout: int, gathered: bool, last: bool
) -> None:
    ids = torch.tensor([4, 6, 0, 4, 5, 1, 2, 3, 3]) if gathered else None
    samples = 9 if gathered else 7
    draws = drawn(samples, crop, flip, cutout)
    found = images(pixels(), ids, draws, MEAN, DEVIATION, crop, cutout, last)
    assert torch.equal(found, by_hand(pixels() if ids is None else pixels()[ids], draws, crop, cutout))
    assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def test_without_draws_nothing_is_changed() -> None:
    found = images(pixels(), None, None, MEAN, DEVIATION, 3, 4, True)
    assert torch.equal(found, by_hand(pixels(), None, 0, 0))


@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(channels: int) -> None:
    found = images(
        pixels(channels=channels), None, None, torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1), 0, 0, True
    )
    assert torch.equal(found, pixels(channels=channels).permute(0, 3, 1, 2).float() / 255)


def test_no_images_are_no_error() -> None:
    assert images(pixels(0), None, None, MEAN, DEVIATION, 0, 0, False).shape == (0, 3, HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("shift", "black"),
    [((2, 0), np.s_[-2:, :]), ((-2, 0), np.s_[:2, :]), ((0, 3), np.s_[:, -3:]), ((0, -3), np.s_[:, :3])],
)
def test_a_shift_uncovers_black_on_every_side(shift: tuple[int, int], black: tuple[slice, slice]) -> None:
    white = torch.full((1, HEIGHT, WIDTH, 1), 255, dtype=torch.uint8)
    draws = torch.tensor([[0], [3 + shift[0]], [3 + shift[1]], [0], [0]])
    expected = torch.ones(HEIGHT, WIDTH)
    expected[black] = 0
    assert torch.equal(images(white, None, draws, *AS_THEY_ARE, 3, 0, False)[0, 0], expected)


@pytest.mark.parametrize("side", [1, 2, 3, 8, 9])
def test_a_square_has_the_side_asked_for_and_may_reach_beyond_the_border(side: int) -> None:
    centres = torch.cartesian_prod(torch.arange(HEIGHT), torch.arange(WIDTH)).T
    white = torch.full((centres.shape[1], HEIGHT, WIDTH, 1), 255, dtype=torch.uint8)
    draws = torch.cat([torch.zeros(3, centres.shape[1], dtype=torch.int64), centres])
    found = images(white, None, draws, *AS_THEY_ARE, 0, side, False)
    for image, (row, column) in zip(found, centres.T.tolist(), strict=True):
        expected = torch.ones(1, HEIGHT, WIDTH)
        top, left = row - side // 2, column - side // 2
        expected[:, max(top, 0) : top + side, max(left, 0) : left + side] = 0
        assert torch.equal(image, expected), f"centre {row}, {column}"


@pytest.mark.parametrize("ids", [None, torch.tensor([1, 1, 0])], ids=["all", "by id"])
def test_without_data_the_shape_and_order_in_memory_are_known(ids: Tensor | None) -> None:
    with FakeTensorMode() as mode:
        given, chosen, mean, deviation = (
            each if each is None else mode.from_tensor(each) for each in (pixels(), ids, MEAN, DEVIATION)
        )
        found = torch.ops.paceline.images(given, chosen, None, mean, deviation, 0, 0, True)
    assert found.shape == (7 if ids is None else 3, 3, HEIGHT, WIDTH)
    assert (found.dtype, found.is_contiguous(memory_format=torch.channels_last)) == (torch.float32, True)
