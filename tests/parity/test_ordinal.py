"""A task of somebody else's is its room and its entry: data, model, training and predictions ask nothing more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import DataError, RecipeError
from paceline.data.labels import encode_labels
from paceline.data.sources import read
from paceline.data.splits import duplicate_keys, split_rows
from paceline.engine.evaluate import evaluate, inference
from paceline.models.heads import head_of
from paceline.models.load import load_model
from paceline.prepare.preparation import build_for
from paceline.recipe import tasks
from paceline.recipe.entries import value_of
from paceline.recipe.parts import DataPart, ModelPart, SplitsPart
from paceline.recipe.rules import check_kind
from paceline.run.learned import nothing_learned
from paceline.run.predictions import Predictions
from paceline.seams import Mesh
from tests.parity import driving, losses
from tests.parity.losses import assert_same, by_hand, chosen, train
from tests.parity.reference import SAMPLES, tiny_model
from tests.tasks.ordinal.entry import ENTRY

NAMES = ("1", "2", "3", "10")
PLACES = np.random.default_rng(3).integers(0, len(NAMES), SAMPLES)


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry, and samples whose labels are places."""
    data = replace(driving.dataset(), kind="ordinal", labels=PLACES, label_names=NAMES)
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, ENTRY))
    monkeypatch.setattr(losses, "rare", lambda kind: PLACES)
    monkeypatch.setattr(losses, "dataset", lambda kind: data)


def by_steps(logits: Tensor, labels: Tensor) -> Tensor:
    above = torch.stack([labels > step for step in range(len(NAMES) - 1)], -1).float()
    return F.binary_cross_entropy_with_logits(logits, above, reduction="none").sum(-1).mean()


def test_a_run_is_that_of_a_plain_loop() -> None:
    expected = by_hand(by_steps, "ordinal")
    assert_same(train(chosen(), "ordinal"), expected)
    assert_same(train(chosen(micro_batch_size=3, packing=True), "ordinal"), expected)


def test_an_evaluation_measures_places() -> None:
    data = losses.dataset("ordinal")
    build = build_for(chosen(), tiny_model(dropout=0.0), data, torch.device("cpu"), mesh=Mesh())
    found = evaluate(inference(build), build, "train", data.splits["train"], 7, step=0, epoch=0)
    assert set(found.metrics) == {"accuracy", "places_away"}
    assert found.samples == SAMPLES
    assert "always guessing" in nothing_learned(
        {"test": replace(found, split="test", metrics={"accuracy": 0.0})},
        replace(data, splits={**data.splits, "test": data.splits["train"]}),
    )


def test_rows_become_places(tmp_path: Path) -> None:
    source = tmp_path / "stars.csv"
    rows = [f"text number {row},{NAMES[row % 4]}" for row in range(40)]
    source.write_text("\n".join(["text,label", *rows]))
    table = read(DataPart(source=str(source)), task="ordinal")
    assert table.labels is not None
    divided = split_rows(table.labels, "ordinal", duplicate_keys(table), None, SplitsPart(validation=8))
    assert len(divided.splits["validation"]) == 8
    labels = encode_labels(table.labels, "ordinal", divided.splits, table.origins)
    assert labels.names == NAMES, "by value, not by character"
    assert labels.values.tolist() == [row % 4 for row in range(40)]
    source.write_text("text,label\ngood,1\nbad,two\n")
    with pytest.raises(DataError, match="no number"):
        read(DataPart(source=str(source)), task="ordinal")


def test_the_head_has_a_row_for_each_step() -> None:
    config = tiny_model().config
    model = load_model(
        ModelPart(config={"model_type": "distilbert"}),
        config,
        num_labels=3,
        label_names=NAMES,
        kind="ordinal",
        vocabulary_size=120,
    )
    assert model.config.id2label == {0: "above 1", 1: "above 2", 2: "above 3"}


def test_predictions_name_the_place() -> None:
    with Predictions() as found:
        found.add([{"text": "fine"}], np.array([[0.1, 0.2, 0.6, 0.1]], np.float32), np.array([1]))
        found.finish("ordinal", NAMES)
    assert found.rows[0]["prediction"] == "3"
    assert found.rows[0]["probability of 10"] == pytest.approx(0.1)


def test_what_its_entry_excludes_is_refused() -> None:
    check_kind("ordinal", partial(value_of, chosen()))
    with pytest.raises(RecipeError, match="no classes to spread over"):
        check_kind("ordinal", partial(value_of, chosen(task={"label_smoothing": 0.1})))


def test_a_task_without_a_fitted_head_says_so() -> None:
    with pytest.raises(RecipeError, match="fits no head") as caught:
        head_of("ordinal").solve(np.zeros((4, 2)), PLACES[:4], "logistic", 3, True)
    assert caught.value.fix == "--set model.train=head"
