"""Token ids that a model has no embedding for are found before a step, where a GPU would stop in a device assert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contract.errors import ModelError
from paceline.contract.stopwatch import Stopwatch, process_start
from paceline.data.dataset import Dataset, Origins, Tokens
from paceline.engine.token_ids import check_token_ids
from paceline.machine.facts import this_machine
from paceline.prepare.assemble import over
from paceline.prepare.preparation import build_for, prepare_run
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.testing.tiny import tiny_bert_config, write_tiny_model

RANDOM = {"source": "builtin:random", "random": {"samples": 32, "length": 8, "vocabulary": 200}}


class Texts(nn.Module):
    """A model with an embedding of 10 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.words


def _recipe(**changes: Any) -> Recipe:
    return Recipe.parse(
        {"model": {"config": tiny_bert_config(vocab_size=200)}, "data": RANDOM, "device": "cpu"} | changes
    )


def _dataset(*ids: int, pad_id: int = 0) -> Dataset:
    num_samples = len(ids) // 2
    return Dataset(
        inputs=Tokens(np.array(ids, dtype=np.uint32), np.arange(num_samples + 1) * 2, pad_id),
        labels=np.zeros(num_samples, np.int64),
        kind="classification",
        label_names=("a", "b"),
        splits={"train": np.arange(num_samples)},
        origins=Origins(("data.csv",), np.zeros(num_samples, np.int32), np.arange(num_samples) + 2),
        fingerprint="",
    )


def _prepared(recipe: Recipe, rows: object = None) -> Any:
    facts = this_machine()
    chosen, decisions = choose(recipe, facts)
    return prepare_run(chosen, decisions, facts=facts, watch=Stopwatch(process_start()), rows=rows)


def test_an_id_beyond_the_table_is_named_with_its_text() -> None:
    recipe = _recipe(model={"factory": "a.b:c", "tokenizer": "somebodys"}, data={"source": "data.csv"})
    with pytest.raises(ModelError) as error:
        check_token_ids(recipe, Texts(), _dataset(1, 2, 3, 10, 4, 5))
    assert "data.csv:3" in error.value.what
    assert "id 10 " in error.value.what
    assert "model.tokenizer = somebodys" in error.value.why
    assert "model.factory = a.b:c" in error.value.why
    assert "10 token embeddings, ids 0 to 9" in error.value.why
    assert error.value.exit_code == 2


def test_the_filling_needs_an_embedding_too() -> None:
    with pytest.raises(ModelError, match=r"filling.* id 12 "):
        check_token_ids(_recipe(), Texts(), _dataset(1, 2, pad_id=12))


@pytest.mark.parametrize("model", [Texts(), nn.Linear(2, 2)], ids=["the last row", "a table that is not known"])
def test_what_fits_or_cannot_be_known_is_let_through(model: nn.Module) -> None:
    check_token_ids(_recipe(), model, _dataset(0, 9) if isinstance(model, Texts) else _dataset(0, 999))


def test_bare_tokens_are_checked_when_a_run_is_put_together() -> None:
    recipe = _recipe()
    prepared = _prepared(recipe)
    dataset: Dataset = prepared.dataset
    assert isinstance(dataset.inputs, Tokens)
    flat = np.array(dataset.inputs.flat)
    flat[7] = 200
    wrong = replace(dataset, inputs=replace(dataset.inputs, flat=flat))
    with pytest.raises(ModelError, match="id 200 "):
        build_for(prepared.recipe, prepared.build.model, wrong, torch.device("cpu"))
    with pytest.raises(ModelError, match="id 200 "):
        over(prepared.recipe, prepared.build, wrong)


@pytest.mark.parametrize("source", ["rows in memory", "a file", "the cache"])
def test_a_tokenizer_with_a_gap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """It has no more tokens than the model has embeddings, and still an id beyond them."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["film"] = 5_000
    path.write_text(json.dumps(content))
    rows = [{"text": f"a wonderful film {number}", "label": "ab"[number % 2]} for number in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = _recipe(model={"source": str(folder)}, data={"source": str(data), "text": "text", "label": "label"})
    for _ in range(1 + (source == "the cache")):
        with pytest.raises(ModelError, match=r"id 5,000 (.|\n)*model.tokenizer = auto(.|\n)*model.source"):
            _prepared(recipe, rows if source == "rows in memory" else None)
    assert (tmp_path / "cache").exists() == (source != "rows in memory")


def _with_token(folder: Path) -> Path:
    """A model whose tokenizer has a token more than the model has embeddings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    tokenizer.save_pretrained(folder)
    return folder


def _rows(*more: str) -> list[dict[str, str]]:
    texts = [f"a {word} evening" for word in ("wonderful", "bad", "slow", "kind")] * 6
    return [{"text": text, "label": f"{at % 2}"} for at, text in enumerate([*texts, *more])]


def test_a_token_beyond_the_embeddings_that_no_text_has_is_told_and_trained_on(tmp_path: Path) -> None:
    recipe = Recipe.parse({"model": {"source": str(_with_token(tmp_path / "model"))}, "data": {"source": "memory"}})
    prepared = _prepared(recipe, _rows())
    rows = prepared.build.model.get_input_embeddings().num_embeddings
    sizes = f"the tokenizer has {rows + 1} tokens, and the model {rows} token embeddings"
    assert f"{sizes}: no text has one of the others ('<extra>')" in prepared.build.notices


def test_a_token_beyond_the_embeddings_is_named_with_both_sizes_and_the_way_out(tmp_path: Path) -> None:
    model = _with_token(tmp_path / "model")
    recipe = Recipe.parse({"model": {"source": str(model)}, "data": {"source": "memory"}})
    with pytest.raises(ModelError) as error:
        _prepared(recipe, _rows("an <extra> evening"))
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert f"has the token '<extra>' (id {rows}), for which the model has no embedding" in error.value.what
    assert f"its tokenizer has {rows + 1} tokens" in error.value.why
    assert f"has {rows} token embeddings" in error.value.why
    assert f"model.resize_token_embeddings({rows + 1})" in error.value.fix


def test_rows_to_predict_with_such_a_token_are_refused(tmp_path: Path) -> None:
    from paceline.verbs.predict import predict

    model = _with_token(tmp_path / "model")
    assert len(predict(model, ["a bad evening"])) == 1
    with pytest.raises(ModelError, match="has the token '<extra>'"):
        predict(model, ["a bad evening", "an <extra> evening"])
