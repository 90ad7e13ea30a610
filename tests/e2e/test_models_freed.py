"""The model of a finished run is freed at once: no technique leaves a circle, which would wait for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline
from paceline.prepare import preparation
from paceline.run import inference
from tests.e2e.conftest import rows
from tests.e2e.whole_runs import recipe
from tests.testing.marks import slow_except
from tests.testing.tiny import tiny_resnet_config

SHORT = {"max_steps": 4, "epochs": 1}
OF_TEXTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "padded": {"techniques": {"packing": False}},
    "early pooling": {"techniques": {"early_pooling": True}},
    "fused products": {"techniques": {"fused_qkv": True}},
    "recompute": {"techniques": {"recompute": True}},
    "bf16": {"techniques": {"precision": "bf16"}},
    "all": {"techniques": {"early_pooling": True, "fused_qkv": True, "recompute": True}},
    "lora": {"model": {"train": "lora"}},
    "head": {"model": {"train": "head"}},
    "ema": {"optimizer": {"ema": 0.9}},
    "windows": {"data": {"overflow": "windows", "max_length": 16}},
}
OF_IMAGES: dict[str, dict[str, Any]] = {
    "images": {},
    "channels last": {"techniques": {"channels_last": True}},
    "group norm": {"model": {"config": tiny_resnet_config(), "group_norm": 2}},
    "flipped": {"techniques": {"tta": ["flip"]}},
}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[nn.Module]]:
    """Every block, and every model, that runs and predictions build, while no circle is collected."""
    seen: list[weakref.ref[nn.Module]] = []
    for home in (preparation, inference):
        assemble = home.assemble_build

        def note(recipe: Any, model: nn.Module, *arguments: Any, _assemble: Any = assemble, **options: Any) -> Any:
            build = _assemble(recipe, model, *arguments, **options)
            seen.extend(map(weakref.ref, [model, *build.blocks]))
            return build

        monkeypatch.setattr(home, "assemble_build", note)
    return seen


def assert_freed(models: list[weakref.ref[nn.Module]]) -> None:
    alive = [type(model).__name__ for reference in models if (model := reference()) is not None]
    assert models, "no model was seen"
    assert not alive, f"{', '.join(sorted(set(alive)))} wait for the garbage collector"


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def imported(pretrained: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch's own circles of a first import, which hold the frames that are open then."""
    paceline.train(recipe(pretrained, reviews, loop=SHORT), out=tmp_path_factory.mktemp("first") / "run")


@pytest.mark.parametrize("name", slow_except(OF_TEXTS, "auto", "all", "lora"))
def test_of_texts(
    name: str,
    pretrained: Path,
    reviews: Path,
    tmp_path: Path,
    models: list[weakref.ref[nn.Module]],
    uncollected: None,
) -> None:
    paceline.train(recipe(pretrained, reviews, loop=SHORT, **OF_TEXTS[name]), out=tmp_path / "run")
    assert_freed(models)
    paceline.evaluate(tmp_path / "run")
    assert_freed(models)
    paceline.predict(tmp_path / "run", [row["text"] for row in rows()[:4]])
    assert_freed(models)


@pytest.mark.parametrize("name", slow_except(OF_IMAGES, "images"))
def test_of_images(name: str, tmp_path: Path, models: list[weakref.ref[nn.Module]], uncollected: None) -> None:
    base: dict[str, Any] = {
        "model": {"config": tiny_resnet_config()},
        "data": {
            "source": "builtin:random",
            "random": {"samples": 24, "image": (32, 32, 3)},
            "splits": {"validation": 8, "test": 0},
        },
        "loop": {"max_steps": 2, "batch_size": 8},
        "device": "cpu",
        "observe": {"console": "off", "report": False},
    }
    paceline.train({**base, **OF_IMAGES[name]}, out=tmp_path / "run")
    assert_freed(models)


def test_what_a_factory_has_put_on_its_model_stays(tmp_path: Path) -> None:
    """A forward pass of the user's own on the instance is no technique's."""
    from paceline.seams import Build

    def forward(given: Any) -> Any:
        return given

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = forward  # type: ignore[method-assign,assignment]

    class Closed:
        def close(self) -> None: ...

    build = Build(
        model=model,
        forward=None,
        layout=Closed(),
        task=None,
        device=None,
        own_forwards={"0": forward},  # type: ignore[arg-type]
    )
    model[0].forward = model[1].forward = lambda given: given  # type: ignore[method-assign,assignment]
    build.close()
    assert model[0].forward is forward
    assert "forward" not in vars(model[1])
