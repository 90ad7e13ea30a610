"""Adapters on a GPU: captured steps are those of eager ones, and the path that is chosen by itself learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.verbs.evaluate import evaluate
from tests.gpu.test_fast_path import FAMILIES, rows, run
from tests.parity.driving import PLAIN, assembled, recipe, train
from tests.parity.test_lora import adapted


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_captured_steps_are_those_of_eager_ones(dora: bool) -> None:
    # a captured micro-batch is filled up to the size of its graph: its dropout draws other masks, so there is none here
    models = []
    for capture in (False, True):
        techniques = {**PLAIN, "packing": True, "early_pooling": True, "precision": "bf16", "capture": capture}
        chosen = recipe(techniques=techniques, optimizer={"decay_all": False})
        model = adapted(0.0, dora=dora).to("cuda")
        made = assembled(model, chosen, device="cuda")
        train(made, chosen)
        assert made.engine.execution["steps"].startswith("captured" if capture else "eager"), made.engine.execution
        models.append(model.cpu())
    eager, captured = (model.state_dict() for model in models)
    for name, weights in eager.items():
        # filler may change the order of a sum; DoRA's norms are such sums
        torch.testing.assert_close(
            captured[name], weights, rtol=0, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}"
        )


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_path_that_is_chosen_by_itself_learns_and_is_measured_again(tmp_path: Path, dora: bool) -> None:
    config = {"model_type": "bert", **FAMILIES["bert"], "initializer_range": 0.2}
    model = {"config": config, "vocabulary_size": 200, "train": "lora", "lora": {"merge": True, "dora": dora}}
    record = run(tmp_path / "run", "bert", {"compile": not dora}, model=model, optimizer={"lr": 5e-3})
    assert record.execution["layout"].startswith("packed"), record.execution
    assert record.execution["steps"].startswith("captured"), record.execution
    assert record.execution["compile"].startswith("off" if dora else "each of 2 blocks"), record.execution
    assert record.final["test"]["accuracy"] > 0.9
    lines = [json.dumps(row) for row in rows()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = evaluate(tmp_path / "run", data=str(tmp_path / "rows.jsonl"))
    assert found.metrics["accuracy"] > 0.9
