"""Image batches: normalised as ever, resident or not, and augmented as PIL would do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images, Tokens
from paceline.data.image_layout import Augmentation
from paceline.data.layout import ImageLayout, resident_bytes
from paceline.data.resident import resident_images, resident_tokens
from paceline.recipe.parts import AugmentPart

CPU = torch.device("cpu")
MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 10, 12, 3), dtype=np.uint8)
LABELS = np.arange(20)
EVERYTHING = AugmentPart(flip=True, crop=3, cutout=4)
IDS = np.array([4, 19, 0, 4])


def layout_of(**settings: Any) -> ImageLayout:
    return ImageLayout(Images(PIXELS), LABELS, CPU, mean=MEAN, deviation=DEVIATION, **settings)


def normalised(pixels: np.ndarray) -> torch.Tensor:
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return (values - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(DEVIATION).view(-1, 1, 1)


def numbers(samples: int, seed: int = 0, part: AugmentPart = EVERYTHING) -> torch.Tensor:
    """Mirrored or not; corners, rows and columns; centres."""
    return Augmentation(part, 10, 12, CPU).draw(samples, seed)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("augment", [None, EVERYTHING, AugmentPart()])
def test_without_a_draw_pixels_are_normalised_and_nothing_else(resident: bool, augment: AugmentPart | None) -> None:
    batch = layout_of(resident=resident, augment=augment).collate(IDS)
    values = batch.inputs["pixel_values"]
    assert torch.equal(values, normalised(PIXELS[IDS]))
    assert values.is_contiguous()
    assert batch.labels.tolist() == IDS.tolist()
    assert batch.weights.tolist() == [1.0] * 4


def test_a_draw_without_augmentation_changes_nothing() -> None:
    for augment in (None, AugmentPart()):
        assert torch.equal(layout_of(augment=augment).collate(IDS, 5).inputs["pixel_values"], normalised(PIXELS[IDS]))


@pytest.mark.parametrize(
    "augment", [EVERYTHING, *(AugmentPart(**{name: 3}) for name in ("crop", "cutout")), AugmentPart(flip=True)]
)
def test_resident_equals_host_bit_for_bit(augment: AugmentPart) -> None:
    host, resident = (layout_of(augment=augment, resident=mode) for mode in (False, True))
    for draw in (None, 0, 1, 2**64 - 1):
        one, other = (layout.collate(IDS, draw) for layout in (host, resident))
        assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"]), f"draw {draw}"
        assert torch.equal(one.labels, other.labels)


def test_channels_last_is_the_same_batch_in_another_order_of_memory() -> None:
    plain, last = (
        layout_of(augment=EVERYTHING, memory_format=memory).collate(IDS, 3).inputs["pixel_values"]
        for memory in (torch.contiguous_format, torch.channels_last)
    )
    assert torch.equal(plain, last)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_the_whole_batch_equals_pil_and_numpy_by_hand() -> None:
    ids = np.random.default_rng(1).integers(0, 20, 40)
    values = layout_of(augment=EVERYTHING).collate(ids, 7).inputs["pixel_values"]
    draws = numbers(40, seed=7)
    for place, sample in enumerate(ids):
        top, left = (draws[1:3, place] - 3).tolist()
        image = Image.fromarray(PIXELS[sample]).crop((left, top, left + 12, top + 10))  # PIL fills with black
        if draws[0, place]:
            image = ImageOps.mirror(image)
        expected = normalised(np.asarray(image).copy()[None])[0]
        top, left = (centre - 2 for centre in draws[3:, place].tolist())
        expected[:, max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
        assert torch.equal(values[place], expected), f"sample {place} of the batch"


def test_the_layout_of_other_images_has_the_same_settings() -> None:
    settings = {"augment": EVERYTHING, "memory_format": torch.channels_last}
    fewer = ImageLayout(Images(PIXELS[:2]), LABELS[:2], CPU, mean=MEAN, deviation=DEVIATION, resident=True, **settings)
    found = fewer.over(Images(PIXELS), LABELS).collate(IDS, 3).inputs["pixel_values"]
    assert torch.equal(found, layout_of(**settings).collate(IDS, 3).inputs["pixel_values"])
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_the_resident_pixels_are_never_changed() -> None:
    layout = layout_of(augment=EVERYTHING, resident=True)
    before = layout.collate(IDS).inputs["pixel_values"]
    for draw in range(5):
        layout.collate(IDS, draw)
    assert torch.equal(layout.collate(IDS).inputs["pixel_values"], before)


def test_draws_cover_their_ranges_and_flip_every_second_time() -> None:
    draws = numbers(20_000)
    assert draws[0].float().mean().item() == pytest.approx(0.5, abs=0.02)
    for corner in draws[1:3]:
        assert corner.unique().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert draws[3].unique().tolist() == list(range(10))
    assert draws[4].unique().tolist() == list(range(12))
    assert (torch.corrcoef(draws.double()) - torch.eye(5)).abs().max() < 0.03, "all five numbers are drawn apart"


def test_equal_draws_are_equal_batches_and_others_are_not() -> None:
    layout = layout_of(augment=EVERYTHING)
    one, other, again = (layout.collate(IDS, draw).inputs["pixel_values"] for draw in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[3]), "one image twice in a batch is changed in two ways"


def test_a_draw_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    layout_of(augment=EVERYTHING).collate(IDS, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["crop", "cutout"])
def test_an_augmentation_as_large_as_the_image_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"data.augment.{name} = 10\n.*10 x 12 pixels"):
        layout_of(augment=AugmentPart(**{name: 10}))
    layout_of(augment=AugmentPart(**{name: 9}))


@pytest.mark.parametrize("resident", [False, True])
def test_an_id_out_of_range_is_an_error(resident: bool) -> None:
    with pytest.raises(IndexError):
        layout_of(resident=resident).collate(np.array([0, 20]))


def test_resident_bytes_are_those_of_the_tensors() -> None:
    tokens = Tokens(np.arange(12, dtype=np.uint16), np.array([0, 5, 12]), 0)
    assert resident_bytes(tokens) == resident_tokens(tokens, CPU).nbytes
    assert resident_bytes(Images(PIXELS)) == resident_images(Images(PIXELS), CPU).nbytes == PIXELS.nbytes
