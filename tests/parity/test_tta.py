"""Probabilities of several views, beside loops by hand: NumPy's crops, PIL's resizing, torch's flip."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.engine.evaluate import evaluate, inference
from paceline.recipe.parts.techniques import VIEWS
from paceline.seams import Build, LayoutKind
from paceline.tasks import task_for
from paceline.techniques import tta
from paceline.techniques.overflow import mean
from paceline.techniques.tta import averaged, views
from tests.parity import driving
from tests.parity.reference import tiny_model

CLASSES = 3


def images(height: int = 16, width: int = 24) -> Tensor:
    return torch.rand(5, 3, height, width, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16 * 24, CLASSES)
        ).eval()


def crops(given: Tensor) -> list[Tensor]:
    """The centre, and the four corners of the images with a frame of the nearest pixels around them."""
    height, width = given.shape[-2:]
    by = min(height, width) // 8
    framed = np.pad(given.numpy(), ((0, 0), (0, 0), (by, by), (by, by)), mode="edge")
    places = [(by, by), *product((0, 2 * by), (0, 2 * by))]
    return [torch.from_numpy(framed[..., y : y + height, x : x + width].copy()) for y, x in places]


def zoomed(given: Tensor, scale: float) -> Tensor:
    """Each channel resized by PIL, then its middle, or the nearest pixels around it."""
    height, width = given.shape[-2:]
    size = round(height * scale), round(width * scale)
    rows = []
    for channel in given.reshape(-1, height, width).numpy():
        resized = np.array(Image.fromarray(channel).resize((size[1], size[0]), Image.Resampling.BILINEAR))
        gaps = [max(0, a - b) for a, b in zip((height, width), size, strict=True)]
        resized = np.pad(resized, [(gap // 2, gap - gap // 2) for gap in gaps], mode="edge")
        top, left = (resized.shape[0] - height) // 2, (resized.shape[1] - width) // 2
        rows.append(resized[top : top + height, left : left + width])
    return torch.from_numpy(np.stack(rows)).view(given.shape)


def by_hand(given: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    found = [given]
    if "scales" in names:
        found = [given, zoomed(given, 0.9), zoomed(given, 1.1)]
    if "crop5" in names:
        found = [crop for one in found for crop in crops(one)]
    if "flip" in names:
        found = [each for one in found for each in (one, torch.flip(one, [-1]))]
    return found


NAMES = [("flip",), ("crop5",), ("scales",), ("flip", "crop5"), ("crop5", "flip", "scales")]


@pytest.mark.parametrize("names", NAMES, ids=",".join)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_views_and_the_mean_of_their_probabilities_are_those_of_a_plain_loop(
    names: tuple[str, ...], memory: torch.memory_format
) -> None:
    given, model = images(), network()
    expected = by_hand(given, names)
    found = views(given.contiguous(memory_format=memory), names)
    assert len(found) == len(expected) == int(np.prod([{"flip": 2, "crop5": 5, "scales": 3}[name] for name in names]))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0, msg=f"view {number} of {names}")
        assert one.is_contiguous(memory_format=memory)
    probabilities = torch.stack([F.softmax(model(view), -1) for view in expected]).mean(0)
    torch.testing.assert_close(averaged(model, given, names), probabilities, atol=1e-5, rtol=0)


@torch.no_grad()
def test_anybodys_model_has_it_in_a_line() -> None:
    # the card's example, docs/techniques/tta.md
    model, photos = network(), images()
    probabilities = averaged(model, photos, ["flip", "crop5"])
    batches = views(photos, ["flip", "crop5"])
    torch.testing.assert_close(probabilities, torch.stack([model(batch).softmax(-1) for batch in batches]).mean(0))
    several = averaged(model, photos, ["flip"], torch.sigmoid)
    torch.testing.assert_close(several, (model(photos).sigmoid() + model(photos.flip(-1)).sigmoid()) / 2)


def test_small_images_and_unknown_names() -> None:
    assert [view.shape for view in views(images(1, 1), ["crop5", "scales"])] == [(5, 3, 1, 1)] * 15
    with pytest.raises(ValueError, match="flop: views of images are"):
        views(images(), ["flop"])


def build_of(kind: str, labels: np.ndarray, names: tuple[str, ...] = ("0", "1", "2")) -> Build:
    pixels = (images().permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)
    layout = ImageLayout(Images(pixels), labels, torch.device("cpu"), mean=(0.5,) * 3, deviation=(0.5,) * 3)
    return Build(
        model=network(),
        forward=lambda model, batch: model(batch.inputs["pixel_values"]),
        layout=layout,
        layout_kind=LayoutKind.IMAGES,
        task=task_for(kind, names, driving.recipe().task),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
def test_a_build_gives_the_averages_back_whatever_the_task(kind: str) -> None:
    labels = {
        "classification": np.array([0, 1, 2, 0, 1]),
        "multi_label": np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]],
        "regression": np.zeros(5, np.float32),
    }[kind]
    plain = build_of(kind, labels)
    build = tta.apply(plain, ("flip", "crop5"))
    assert build.notices == ("techniques.tta = flip, crop5: each image is computed 10 times",)
    batch = build.layout.collate(np.arange(5))
    each = [
        plain.task.probabilities(build.model(view)) for view in views(batch.inputs["pixel_values"], ["flip", "crop5"])
    ]
    expected = torch.stack(each).mean(0)
    torch.testing.assert_close(build.task.probabilities(inference(build)(batch)), expected, atol=1e-6, rtol=0)
    build.model.train()
    torch.manual_seed(1)
    trained = build.forward(build.model, batch)
    torch.manual_seed(1)
    assert torch.equal(trained, plain.forward(plain.model.train(), batch)), "training passes are as they were"


@torch.no_grad()
def test_the_loss_is_that_of_the_averaged_probabilities() -> None:
    labels = np.array([0, 1, 2, 0, 1])
    build = tta.apply(build_of("classification", labels), ("flip",))
    record = evaluate(inference(build), build, "test", np.arange(5), 2, step=0, epoch=0)
    pixels = build.layout.collate(np.arange(5)).inputs["pixel_values"]
    probabilities = averaged(build.model, pixels, ["flip"])
    assert record.loss == pytest.approx(float(F.nll_loss(probabilities.log(), torch.from_numpy(labels))), abs=1e-6)
    assert record.samples == 5


def test_probabilities_of_zero_and_one_stay_numbers() -> None:
    for kind in ("classification", "multi_label"):
        logits = task_for(kind, ("a", "b", "c"), driving.recipe().task).logits(torch.tensor([[0.0, 1.0, 0.0]]))
        assert torch.isfinite(logits).all()


def test_windows_are_averaged_in_probability() -> None:
    task = task_for("classification", ("0", "1"), driving.recipe().task)
    logits, which = torch.tensor([[4.0, 0.0], [0.0, 0.0], [1.0, 2.0]]), torch.tensor([0, 0, 1])
    joined = tta.of_windows(task, mean)(logits, which, 2)
    expected = torch.stack([logits[:2].softmax(-1).mean(0), logits[2].softmax(-1)])
    torch.testing.assert_close(task.probabilities(joined), expected)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="flip: no view of a text"):
        tta.apply(driving.assembled(tiny_model(), driving.recipe()).build, ("flip",))
    with pytest.raises(RecipeError, match=r"windows: no view of an image[\s\S]*--tta flip$"):
        tta.apply(build_of("classification", np.zeros(5, np.int64)), ("flip", "windows"))
    with pytest.raises(RecipeError, match="flop: no view has this name; did you mean"):
        driving.recipe(techniques={"tta": ["flop"]})
    with pytest.raises(RecipeError, match="stands in it twice"):
        driving.recipe(techniques={"tta": "flip,flip"})
    assert driving.recipe(techniques={"tta": "flip,crop5"}).techniques.tta == ("flip", "crop5")
    assert {*tta._VIEWS, "windows"} == set(VIEWS)
