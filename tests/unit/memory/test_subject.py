"""What a plan is about, where the data are on this machine and where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Images, Tokens
from paceline.memory.subject import Subject, subject_of
from paceline.recipe import Recipe
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config


def subject(config: dict[str, Any], *settings: str, **data: Any) -> Subject:
    base = {"model": {"config": config}, "data": data, "loop": {"batch_size": 8, "evaluation_batch_size": 32}}
    return subject_of(Recipe.parse({**base, "device": "cpu"}).with_settings(settings))


def test_texts_that_were_not_read_are_as_long_as_they_may_be() -> None:
    found = subject(tiny_bert_config(), source="nowhere.csv", max_length=40)
    assert isinstance(found.dataset.inputs, Tokens)
    assert set(found.dataset.inputs.lengths) == {40}
    assert len(found.dataset.labels) == 64, "an evaluation's batch, twice"
    said, few = found.assumed
    assert said.startswith("40 tokens in every text")
    assert few.startswith("64 samples, as few as its batches take: compiling pays in a longer run")
    assert found.decisions == ()


@pytest.mark.parametrize("switch", ["true", "false"])
def test_how_many_samples_there_are_is_said_where_something_follows_from_it(switch: str) -> None:
    (said,) = subject(tiny_bert_config(), f"techniques.compile={switch}", source="nowhere.csv").assumed
    assert "tokens" in said


def test_the_models_positions_bound_them() -> None:
    found = subject(tiny_bert_config(max_position_embeddings=24), source="nowhere.csv")
    assert isinstance(found.dataset.inputs, Tokens)
    assert set(found.dataset.inputs.lengths) == {24}
    assert [decision.setting for decision in found.decisions] == ["data.max_length"]
    assert found.recipe.data.max_length == 24


def test_images_have_the_size_that_is_set_or_no_plan() -> None:
    with pytest.raises(RecipeError, match="image_size: not set"):
        subject(tiny_resnet_config(), source="nowhere")
    found = subject(tiny_resnet_config(), "data.image_size=24", source="nowhere")
    assert isinstance(found.dataset.inputs, Images)
    assert found.dataset.inputs.pixels.shape == (64, 24, 24, 3)
    assert found.assumed[0].startswith("24 x 24 pixels an image; the images themselves are not counted, up to a tenth")
    assert found.recipe.data.resident is False, "made-up images would be"
    kept = subject(tiny_resnet_config(), "data.image_size=24", "data.resident=true", source="nowhere")
    assert kept.recipe.data.resident is True


def test_labels_that_were_not_read_are_not_weighed() -> None:
    """Nobody knows their names; a run that reads them weighs them, or refuses."""
    found = subject(tiny_bert_config(), "task.class_weights={ham: 1, spam: 3}", source="nowhere.csv")
    assert found.recipe.task.class_weights is None
    drawn = subject(tiny_bert_config(), "loop.sampler=balanced", "task.type=multi_label", source="nowhere.csv")
    assert drawn.recipe.loop.sampler is None
    known = subject(tiny_bert_config(), "task.class_weights=balanced", source="builtin:random")
    assert known.recipe.task.class_weights == "balanced"


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "names"),
    [
        ("classification", (64,), np.int64, ("0", "1")),
        ("regression", (64,), np.float32, ("target",)),
        ("multi_label", (64, 2), np.float32, ("0", "1")),
    ],
)
def test_labels_are_those_of_the_task(kind: str, shape: tuple[int, ...], dtype: Any, names: tuple[str, ...]) -> None:
    dataset = subject(tiny_bert_config(), f"task.type={kind}", source="nowhere.csv").dataset
    assert (dataset.kind, dataset.label_names) == (kind, names)
    assert (dataset.labels.shape, dataset.labels.dtype) == (shape, dtype)


def test_made_data_are_made(tmp_path: Path) -> None:
    random = {"samples": 50, "length": [5, 9], "vocabulary": 300}
    found = subject(tiny_bert_config(vocab_size=300), source="builtin:random", random=random)
    assert found.assumed == ()
    assert isinstance(found.dataset.inputs, Tokens)
    assert set(found.dataset.inputs.lengths) <= {5, 6, 7, 8, 9}
    assert set(found.dataset.splits) == {"train", "validation", "test"}


def test_what_is_assumed_is_evaluated_too() -> None:
    found = subject(tiny_bert_config(), source="nowhere.csv")
    assert "validation" in found.dataset.splits
