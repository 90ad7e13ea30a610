"""A saved run keeps what is kept of long texts: in evaluate, in predict, and as a model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

import paceline as library
from paceline.contract.errors import RecipeError
from paceline.models.saved import load_saved
from tests.e2e.commands import reviews, write_csv
from tests.e2e.test_inference import train_run
from tests.testing.marks import slow_except
from tests.testing.tiny import write_tiny_model

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


@pytest.mark.parametrize("choice", slow_except(CHOICES, "windows"))
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


def cutting_left(folder: Path) -> Path:
    """A pretrained model whose tokenizer cuts on the left."""
    AutoTokenizer.from_pretrained(write_tiny_model(folder), truncation_side="left").save_pretrained(folder)
    return folder


def by_pipeline(model: Path, text: str) -> dict[str, float]:
    """Probabilities of a text by transformers alone, cut as the saved tokenizer cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # which a pipeline would set, and leave behind
        classify = pipeline("text-classification", model=str(model), top_k=None, device="cpu")
        (found,) = classify([text], truncation=True)
    return {one["label"]: one["score"] for one in found}


def train_on(model: Path, folder: Path, *settings: str) -> Path:
    data = write_csv(folder / "reviews.csv", long_reviews(60))
    recipe = library.Recipe.parse(
        {
            "model": {"source": str(model)},
            "data": {"source": str(data), "max_length": MAX_LENGTH},
            "loop": {"epochs": 1, "batch_size": 8},
            "observe": {"console": "plain", "report": False},
        }
    )
    library.train(recipe.with_settings(settings), out=folder / "run")
    return folder / "run"


@pytest.mark.parametrize("kept", slow_except(["nothing set", "head", "tail"], "nothing set"))
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_kept_is_what_is_said_in_console_predictions_and_transformers(
    tmp_path: Path, side: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beginning and end of a text differ, so that each use of the model shows which of them it reads."""
    model = cutting_left(tmp_path / "model") if side == "left" else write_tiny_model(tmp_path / "model")
    run = train_on(model, tmp_path, *([] if kept == "nothing set" else [f"data.overflow={kept}"]))
    expected = kept if kept != "nothing set" else "tail" if side == "left" else "head"
    printed = capsys.readouterr().out
    (cut,) = (line for line in printed.splitlines() if line.strip().startswith("cut"))
    assert f"data.overflow = {expected}" in cut
    assert ("data.overflow = tail: the tokenizer cuts" in printed) == (side == "left" and kept == "nothing set")
    text = " ".join(["bad"] * 8 + ["slow"] * 2 + ["wonderful"] * 8)
    texts = {"whole": text, "head": "bad " * 8, "tail": "wonderful " * 8}
    told = {name: library.predict(run, [one])[0]["probability of positive"] for name, one in texts.items()}
    assert told["head"] != told["tail"], "this test would not see which of them was read"
    assert told["whole"] == pytest.approx(told[expected], abs=1e-6)
    assert by_pipeline(run / "model", text)["positive"] == pytest.approx(told["whole"], abs=1e-5)
    (row,) = library.predict(run / "model", [text])
    assert row["probability of positive"] == pytest.approx(told["whole"], abs=1e-6)


def test_a_model_from_elsewhere_is_measured_as_its_tokenizer_cuts(tmp_path: Path) -> None:
    model = cutting_left(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = MAX_LENGTH
    tokenizer.save_pretrained(model)
    text = " ".join(["bad"] * 12 + ["wonderful"] * 12)
    (row,) = library.predict(model, [text])
    assert row["probability of LABEL_0"] == pytest.approx(by_pipeline(model, text)["LABEL_0"], abs=1e-5)
