"""A saved run keeps what is kept of long texts: in evaluate, in predict, and as a model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as library
from paceline.contract.errors import RecipeError
from paceline.models.saved import load_saved
from tests.e2e.commands import reviews, write_csv
from tests.e2e.test_inference import train_run

CHOICES: dict[str, dict[str, Any]] = {
    "tail": {"overflow": "tail"},
    "head+tail": {"overflow": "head+tail", "head": 0.5},
    "windows": {"overflow": "windows", "stride": 2, "aggregate": "max"},
}
MAX_LENGTH = 10


def long_reviews(count: int) -> list[dict[str, str]]:
    """Of one to three sentences."""
    rows = reviews(count)
    return [
        {"text": " . ".join(row["text"] for row in rows[at : at + 1 + at % 3]), "label": row["label"]}
        for at, row in enumerate(rows)
    ]


def by_hand(run: Path, text: str, choice: str) -> list[float]:
    """Probabilities of a text by transformers alone."""
    loaded = load_saved(run / "model")
    tokenizer, room = loaded.tokenizer, MAX_LENGTH - 2
    assert tokenizer is not None
    inner = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(inner) <= room:
        kept = [inner]
    elif choice == "tail":
        kept = [inner[-room:]]
    elif choice == "head+tail":
        kept = [inner[: room // 2] + inner[-(room - room // 2) :]]
    else:
        kept = [inner[at : at + room] for at in range(0, len(inner) - 2, room - 2)]
    rows = [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id] for ids in kept]
    with torch.no_grad():
        logits = torch.cat([loaded.model(torch.tensor([row])).logits for row in rows])
    return logits.amax(0).softmax(-1).tolist()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_saved_run_keeps_the_choice(tmp_path: Path, choice: str) -> None:
    data = write_csv(tmp_path / "reviews.csv", long_reviews(60))
    run = train_run(tmp_path, data, max_length=MAX_LENGTH, **CHOICES[choice])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if line.get("split") == "test"]
    found = library.evaluate(run)
    assert found.samples == 6, "rows are texts"
    assert measured["loss"] == pytest.approx(found.loss, abs=1e-5)
    texts = [row["text"] for row in long_reviews(12)] + ["fine"]
    rows = library.predict(run, texts)
    assert len(rows) == len(texts)
    given = [[row["probability of negative"], row["probability of positive"]] for row in rows]
    assert np.allclose(given, [by_hand(run, text, choice) for text in texts], atol=3e-6)
    assert library.predict(run / "model", texts) == rows, "a model alone has it in paceline.json"
    padded = library.predict(run, texts, settings=["techniques.packing=false"])
    assert np.allclose([[row["probability of negative"]] for row in padded], np.array(given)[:, :1], atol=3e-6)
    with pytest.raises(RecipeError, match="has no effect"):
        library.predict(run, texts, settings=["data.overflow=head"])


def test_steps_and_samples_are_counted_in_texts(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "reviews.csv", long_reviews(60))
    run = train_run(tmp_path, data, max_length=MAX_LENGTH, **CHOICES["windows"])
    started = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert started["samples"] == {"train": 48, "validation": 6, "test": 6}
    assert started["total_steps"] == 12
    assert started["data"]["lengths"]["windows"] > 1


def test_features_of_windows_are_refused_before_anything_loads() -> None:
    with pytest.raises(RecipeError, match=r"data\.overflow = windows: cannot work with model\.train = features"):
        library.train(
            library.Recipe.parse(
                {
                    "model": {"source": "absent", "train": "features"},
                    "data": {"source": "absent.csv", "overflow": "windows"},
                    "device": "cpu",
                }
            )
        )
