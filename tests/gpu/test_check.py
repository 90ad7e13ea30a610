"""``paceline check`` on a GPU: what is claimed of one holds, of texts with dropout and of images."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from paceline.check.checking import findings
from paceline.check.claims import CLAIMS
from paceline.check.subject import Subject, subject_of
from paceline.recipe import Recipe
from tests.testing.tiny import TEXTS, tiny_bert_config

OF_A_GPU = ("repeat", "compile", "capture", "recompiles", "waits", "memory")


def texts(folder: Path) -> dict[str, Any]:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([f"{index} {TEXTS[index % 4]} " * (1 + index % 7), index % 2] for index in range(200))
    config = tiny_bert_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return {"model": {"config": config, "vocabulary_size": 300}, "data": {"source": str(folder / "rows.csv")}}


def images(folder: Path) -> dict[str, Any]:
    config = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model": {"config": {**config, "patch_size": 2}}, "data": {"source": "builtin:digits"}}


@pytest.fixture(scope="module", params=[texts, images], ids=["texts", "images"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("subject")
    return subject_of(Recipe.parse({**request.param(folder), "device": "cuda"}), 20, folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OF_A_GPU)
def test_what_is_claimed_of_a_gpu_holds(name: str, subject: Subject) -> None:
    (claim,) = (each for each in CLAIMS if each.name == name)
    (found,) = findings([claim], subject)
    allowed = ("passed", "not applicable") if name in ("compile", "recompiles") else ("passed",)
    assert found.status in allowed, found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["compile", "recompiles"])
def test_a_compiled_run_is_compiled_once(name: str, tmp_path: Path) -> None:
    """Where ``auto`` would not compile so short a run: it is asked for."""
    recipe = Recipe.parse({**texts(tmp_path), "device": "cuda", "techniques": {"compile": True}})
    (claim,) = (each for each in CLAIMS if each.name == name)
    (found,) = findings([claim], subject_of(recipe, 20, tmp_path))
    assert found.status == "passed", found
