"""The weights that a run has saved are those that are tried, or it is told that they cannot be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.check import subject as module
from paceline.check.accumulation import gradients
from paceline.check.claim import Broken
from paceline.check.resume import _same_records
from paceline.contract.errors import UserError
from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.recipe import Recipe

RECIPE = Recipe.parse({"model": {"source": "somewhere"}, "data": {"source": "rows.csv"}})


def classifier(*labels: str, width: int = 3) -> nn.Module:
    made = nn.Linear(width, len(labels))
    made.config = SimpleNamespace(id2label=dict(enumerate(labels)))  # type: ignore[assignment]
    return made


def take_up(model: nn.Module, saved: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_saved", lambda *_, **__: SimpleNamespace(model=saved))
    module._take_up(model, Path("runs/reviews/model"), RECIPE)


def test_a_runs_weights_take_the_place_of_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved = classifier("bad", "good"), classifier("bad", "good")
    take_up(model, saved, monkeypatch)
    assert torch.equal(model.weight, saved.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (classifier("bad", "good", width=4), "weights are not those"),
        (classifier("bad", "fair", "good"), "weights are not those"),
        (classifier("good", "bad"), "labels are"),
    ],
)
def test_weights_that_cannot_be_taken_are_not_left_out_in_silence(
    saved: nn.Module, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=told):
        take_up(classifier("bad", "good"), saved, monkeypatch)


def record(kind: type[Any], step: int) -> Any:
    made = object.__new__(kind)
    for name, value in (("step", step), ("loss", 0.5)):
        object.__setattr__(made, name, value)
    return made


def test_a_resumed_run_makes_every_step_and_evaluation_that_was_left() -> None:
    whole = [record(StepRecord, 1), record(StepRecord, 2), record(StepRecord, 3), record(EvaluationRecord, 3)]
    _same_records(whole, whole[1:], 1)
    with pytest.raises(Broken, match="does not make step 3"):
        _same_records(whole, [whole[1], whole[3]], 1)
    with pytest.raises(Broken, match="does not evaluate after step 3"):
        _same_records(whole, whole[1:3], 1)


def test_where_no_weight_has_a_gradient_nothing_is_taken_for_equal() -> None:
    steps: Any = SimpleNamespace(build=SimpleNamespace(model=nn.Linear(3, 2)))
    with pytest.raises(Broken, match="no trained weight has a gradient"):
        gradients(steps)
