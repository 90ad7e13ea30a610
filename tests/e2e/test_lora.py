"""Runs with ``model.train: lora``, from the data to the use of what they saved, either way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as library
from paceline.contract.errors import ModelError, Preempted, RecipeError, UserError
from paceline.models.saved import load_saved
from paceline.testing.tiny import tiny_bert_config, tiny_resnet_config
from tests.e2e.commands import Paceline, in_process, read_csv
from tests.e2e.test_resume import stopped
from tests.e2e.whole_runs import Disturb, recipe

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
    done = paceline("predict", tmp_path / "run", "--data", reviews, "--out", tmp_path / "labelled.csv")
    assert done.code == 0, done.err
    assert len(read_csv(tmp_path / "labelled.csv")) == 60
    by_folder = paceline("predict", tmp_path / "run/model", "--data", reviews, "--out", tmp_path / "again.csv")
    assert by_folder.code == 0, by_folder.err
    assert read_csv(tmp_path / "again.csv") == read_csv(tmp_path / "labelled.csv")


def test_only_adapters_and_head_are_trained_and_counted(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    library.train(lora(pretrained, reviews, rank=2, targets=["query", "value"]), out=tmp_path / "run")
    (begun,) = [
        line
        for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if line["kind"] == "run_started"
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
    assert isinstance(Preempted, type)


@pytest.mark.parametrize(
    ("model", "error", "fix"),
    [
        ({"lora": {"targets": ["quary"]}}, "no linear layer quary", "model.lora.targets=auto"),
        ({"config": {"hidden_act": "relu"}, "lora": {"rank": 0}}, "model.lora.rank", ""),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    model: dict[str, Any], error: str, fix: str, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=error) as caught:
        library.train(recipe(pretrained, reviews, model={"train": "lora", **model}), out=tmp_path / "run")
    assert fix in caught.value.fix
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def images(**model: Any) -> dict[str, Any]:
    return {
        "model": {"train": "lora", **model},
        "data": {"source": "builtin:random", "random": {"kind": "image", "samples": 24}, "image_size": 8},
        "loop": {"batch_size": 8, "max_steps": 2},
        "device": "cpu",
        "observe": {"console": "off", "report": False},
    }


def test_a_model_of_convolutions_is_refused(tmp_path: Path) -> None:
    chosen = images(config=tiny_resnet_config(), lora={"merge": True})
    with pytest.raises(ModelError, match="no linear layers in its blocks"):
        library.train(chosen, out=tmp_path / "run")


def test_random_weights_need_to_be_saved_whole(reviews: Path, tmp_path: Path) -> None:
    model = {"source": None, "config": tiny_bert_config(), "train": "lora"}
    with pytest.raises(RecipeError, match=r"set lora\.merge: true"):
        recipe(reviews, reviews, model=model)
    library.train(recipe(reviews, reviews, model={**model, "lora": {"merge": True}}), out=tmp_path / "run")
    assert library.evaluate(tmp_path / "run", split="test").loss > 0


def test_learning_is_seen_beside_training_all(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    """Two classes that a few words tell apart: with adapters the loss falls about as far as with all weights."""
    losses = {}
    for train in ("all", "lora", "head"):
        torch.manual_seed(0)
        chosen = recipe(
            pretrained,
            reviews,
            model={"train": train},
            loop={"epochs": 30, "max_steps": 150, "save_best": False, "evaluate_every": "never"},
        )
        losses[train] = library.train(chosen, out=tmp_path / train).final["validation"]["loss"]
    assert losses["lora"] < 0.5 * losses["head"], losses
