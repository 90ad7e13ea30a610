"""Runs with ``model.train: lora``, from the data to the use of what they saved, either way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline as library
from paceline.contract.errors import ModelError, RecipeError
from paceline.models.saved import load_saved
from paceline.prepare.preparation import _adapt
from paceline.recipe.parts import ModelPart
from tests.e2e.commands import Paceline, in_process, read_csv
from tests.e2e.test_resume import stopped
from tests.e2e.whole_runs import Disturb, recipe
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, write_tiny_model

SAVED = {
    False: {"adapter_config.json", "adapter_model.safetensors"},
    True: {"model.safetensors"},
}


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


def lora(pretrained: Path, reviews: Path, *, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    return recipe(pretrained, reviews, model={"train": "lora", "lora": settings}, **(changes or {}))


@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "whole"])
def test_what_a_run_saves_is_used_as_it_was_measured(
    merge: bool, pretrained: Path, reviews: Path, tmp_path: Path, paceline: Paceline
) -> None:
    record = library.train(lora(pretrained, reviews, merge=merge), out=tmp_path / "run")
    here = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert here >= {*SAVED[merge], "config.json", "paceline.json", "tokenizer.json"}
    assert not here & SAVED[not merge]
    found = library.evaluate(tmp_path / "run", split="test")
    assert found.loss == pytest.approx(record.final["test"]["loss"], abs=1e-6)
    done = paceline("predict", tmp_path / "run", reviews, "--out", tmp_path / "labelled.csv")
    assert done.code == 0, done.err
    assert len(read_csv(tmp_path / "labelled.csv")) == 60
    by_folder = paceline("predict", tmp_path / "run/model", reviews, "--out", tmp_path / "again.csv")
    assert by_folder.code == 0, by_folder.err
    assert read_csv(tmp_path / "again.csv") == read_csv(tmp_path / "labelled.csv")


def test_only_adapters_and_head_are_trained_and_counted(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    library.train(lora(pretrained, reviews, rank=2, targets=["query", "value"]), out=tmp_path / "run")
    (begun,) = [
        line
        for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if line["kind"] == "start"
    ]
    adapters, head = 2 * 2 * (16 * 2 + 2 * 16), 16 * 2 + 2
    assert begun["num_trained_parameters"] == adapters + head


def test_a_run_that_goes_on_may_save_the_other_way(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    straight = library.train(lora(pretrained, reviews), out=tmp_path / "straight")
    stopped(lora(pretrained, reviews), tmp_path / "run", disturb, 5)
    record = library.resume(tmp_path / "run", ["model.lora.merge=true"])
    assert record.final == straight.final
    one, other = (load_saved(tmp_path / name / "model").model.state_dict() for name in ("straight", "run"))
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 3e-8


def test_a_name_that_no_layer_has_is_refused_before_the_first_step(
    pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no linear layer quary"):
        library.train(lora(pretrained, reviews, targets=["quary"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_of_convolutions_is_refused(tmp_path: Path) -> None:
    chosen = {
        "model": {"config": tiny_resnet_config(), "train": "lora", "lora": {"merge": True}},
        "data": {"source": "builtin:random", "random": {"image": [8, 8, 3], "samples": 24}},
        "device": "cpu",
    }
    with pytest.raises(ModelError, match="no linear layers in its blocks"):
        library.train(chosen, out=tmp_path / "run")


def test_statistics_of_batches_need_to_be_saved_whole() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = nn.Sequential(nn.ModuleList([block, copy.deepcopy(block)]), nn.Linear(4, 2))
    with pytest.raises(ModelError, match="batch normalisations") as caught:
        _adapt(model, ModelPart(source="given", train="lora"), seed=0)
    assert caught.value.fix == "--set model.lora.merge=true"
    _adapt(model, ModelPart.model_validate({"source": "given", "train": "lora", "lora": {"merge": True}}), seed=0)


def test_random_weights_need_to_be_saved_whole(reviews: Path, tmp_path: Path) -> None:
    model = {"source": None, "config": tiny_bert_config(), "train": "lora"}
    with pytest.raises(RecipeError, match=r"--set model\.lora\.merge=true"):
        recipe(reviews, reviews, model=model)
    library.train(recipe(reviews, reviews, model={**model, "lora": {"merge": True}}), out=tmp_path / "run")
    assert library.evaluate(tmp_path / "run", split="test").loss > 0


@pytest.mark.slow
def test_adapters_learn_what_all_weights_learn(reviews: Path, tmp_path: Path) -> None:
    """The head alone learns nothing of these texts: adapters win most of what all weights do."""
    base = write_tiny_model(tmp_path / "base", tiny_bert_config(initializer_range=0.3))
    losses = {}
    for train in ("all", "lora", "head"):
        chosen = recipe(
            base,
            reviews,
            model={"train": train},
            loop={"epochs": 20, "max_steps": 60, "save_best": False, "evaluate_every": "never"},
        )
        record = library.train(chosen, out=tmp_path / train)
        losses[train] = record.final["validation"]["loss"] + record.final["test"]["loss"]
    won = (losses["head"] - losses["lora"]) / (losses["head"] - losses["all"])
    assert losses["all"] < 0.6 * losses["head"], losses
    assert won > 0.7, losses
