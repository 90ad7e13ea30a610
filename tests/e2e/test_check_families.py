"""``paceline check`` is quiet on healthy models: every claim that has something to be about holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.check.claims import CLAIMS
from paceline.models.load import quiet
from paceline.recipe import Recipe
from paceline.verbs.check import Checked, check
from tests.parity.tiny_families import write_image_model, write_text_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("forked_interpreters")]

TEXTS = (
    *("albert", "bart", "bert", "camembert", "deberta-v2", "distilbert", "electra", "ernie", "gpt2", "llama"),
    *("modernbert", "mpnet", "nystromformer", "qwen2", "roberta", "t5", "xlm-roberta", "xlnet"),
)
IMAGES = ("convnext", "deit", "dinov2", "resnet", "swin", "vit")

ON_RANKS = ("bert", "gpt2", "resnet")
"""Of these also on two ranks: an encoder, a decoder and one with batch norms."""


def checked(model: Path, source: Path, family: str, **data: Any) -> Checked:
    plain: dict[str, Any] = {
        "name": "tiny",
        "model": {"source": str(model)},
        "data": {"source": str(source), "max_length": 32, **data},
        "device": "cpu",
    }
    if not data:
        del plain["data"]["max_length"]
    several = ("ranks", "strategies")
    only = [claim.name for claim in CLAIMS if family in ON_RANKS or claim.name not in several]
    return check(Recipe.parse(plain), only)


def write_pictures(folder: Path, count: int = 36) -> None:
    """Noise of two shades, in a folder a class."""
    rng = np.random.default_rng(3)
    for index in range(count):
        path = folder / ("dark", "light")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 160, (8, 8, 3), dtype=np.uint8) + np.uint8(90 * (index % 2))
        Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(path)


def assert_quiet(found: Checked) -> None:
    failed = [f"{each.claim}: {each.told}" for each in found.findings if each.status == "failed"]
    assert not failed, "\n".join(failed)
    assert found.counts["passed"] >= 8, found.plain()


@pytest.mark.parametrize("family", TEXTS)
def test_of_texts(family: str, tmp_path: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    with quiet():
        write_text_model(family, tmp_path / "model")
    assert_quiet(checked(tmp_path / "model", reviews, family, text="text"))


@pytest.mark.parametrize("family", IMAGES)
def test_of_images(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    with quiet():
        write_image_model(family, tmp_path / "model")
    write_pictures(tmp_path / "pictures")
    assert_quiet(checked(tmp_path / "model", tmp_path / "pictures", family))
