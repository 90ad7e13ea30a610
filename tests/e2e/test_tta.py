"""``--tta`` of whole runs: of images and of long texts, in predict and in evaluate."""

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
from paceline.techniques.tta import averaged
from tests.e2e.commands import Paceline, in_process, read_csv, reviews, write_csv
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config

MAX_LENGTH = 6


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


def train_run(folder: Path, **settings: Any) -> Path:
    quiet = {"observe": {"console": "off", "report": False}, "optimizer": {"lr": 1e-3}, "device": "cpu"}
    library.train(library.Recipe.parse({**quiet, **settings}), out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CNN on a few digits, that no test changes."""
    data = {"source": "builtin:digits", "splits": {"train": 120, "validation": 30, "test": 40}}
    model = {"config": tiny_resnet_config()}
    return train_run(tmp_path_factory.mktemp("digits"), model=model, data=data, loop={"epochs": 1, "batch_size": 32})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT on the beginnings of reviews."""
    folder = tmp_path_factory.mktemp("texts")
    data = {"source": str(write_csv(folder / "reviews.csv", reviews(60))), "max_length": MAX_LENGTH}
    model = {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300}
    return train_run(folder, model=model, data=data, loop={"epochs": 1, "batch_size": 8})


def probabilities(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[float(v) for k, v in row.items() if k.startswith("probability of ")] for row in rows])


def test_predict_averages_views_of_digits(digits: Path, tmp_path: Path, paceline: Paceline) -> None:
    out = tmp_path / "out.csv"
    done = paceline("predict", digits, "builtin:digits", "-o", out, "--tta", "flip,crop5")
    assert done.code == 0, done.err
    assert "each image is computed 10 times" in done.err
    found = probabilities(read_csv(out))
    loaded = load_saved(digits / "model")
    from sklearn.datasets import load_digits

    grey = load_digits().images[:200]
    image = loaded.saved.image
    assert image is not None
    pixels = torch.tensor(np.round(grey * 255 / 16) / 255, dtype=torch.float32)[:, None]
    pixels = (pixels - image.mean[0]) / image.std[0]
    pixels = pixels.expand(-1, image.channels, -1, -1)
    with torch.no_grad():
        expected = averaged(lambda view: loaded.model(view).logits, pixels, ["flip", "crop5"])
    np.testing.assert_allclose(found[:200], expected.numpy(), atol=2e-5)
    assert paceline("predict", digits, "builtin:digits", "-o", tmp_path / "plain.csv").code == 0
    plain = probabilities(read_csv(tmp_path / "plain.csv"))
    assert np.abs(found - plain).max() > 1e-4, "one view alone"


def test_evaluate_averages_views_and_a_recipe_may_ask_for_them(digits: Path, paceline: Paceline) -> None:
    done = paceline("evaluate", digits, "--tta", "flip")
    assert done.code == 0, done.err
    assert "each image is computed 2 times" in done.err
    assert done.out.startswith("test: 40 samples")
    asked = library.evaluate(digits, settings=["techniques.tta=[flip]"])
    assert f"{asked.loss:.4f}" in done.out
    assert asked.loss != library.evaluate(digits).loss


def test_a_run_may_have_views_in_its_own_evaluations(tmp_path: Path) -> None:
    data = {"source": "builtin:digits", "splits": {"train": 64, "validation": 30, "test": 40}}
    settings = {"model": {"config": tiny_resnet_config()}, "data": data, "loop": {"epochs": 1, "batch_size": 32}}
    run = train_run(tmp_path, **settings, techniques={"tta": ["flip"]})
    final = json.loads((run / "summary.json").read_text())["final"]["test"]
    kept, without = library.evaluate(run), library.evaluate(run, settings=["techniques.tta=[]"])
    assert final["loss"] == kept.loss != without.loss
    plain = train_run(tmp_path / "plain", **settings)
    assert library.evaluate(plain).loss == without.loss, "weights are the same"


def test_bare_tokens_have_no_windows(tmp_path: Path) -> None:
    random = {"samples": 60, "length": 8, "vocabulary": 200}
    run = train_run(
        tmp_path,
        model={"config": tiny_bert_config()},
        data={"source": "builtin:random", "random": random},
        loop={"epochs": 1, "batch_size": 16},
    )
    with pytest.raises(RecipeError, match="no effect on bare tokens"):
        library.evaluate(run, settings=["techniques.tta=windows"])


def test_windows_of_a_model_that_read_beginnings(texts: Path, paceline: Paceline) -> None:
    text = "a fine film and a dull evening and a fine sound 3"
    rows = library.predict(texts, [text, "a"], settings=["techniques.tta=windows"])
    loaded = load_saved(texts / "model")
    assert loaded.tokenizer is not None
    inner = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    room, overlap = MAX_LENGTH - 2, round(0.25 * (MAX_LENGTH - 2))
    starts = range(0, len(inner) - overlap, room - overlap)
    ends = loaded.tokenizer.cls_token_id, loaded.tokenizer.sep_token_id
    with torch.no_grad():
        windows = [torch.tensor([[ends[0], *inner[at : at + room], ends[1]]]) for at in starts]
        expected = torch.cat([loaded.model(window).logits for window in windows]).softmax(-1).mean(0)
    np.testing.assert_allclose(probabilities(rows)[0], expected.numpy(), atol=3e-6)
    plain = library.predict(texts, [text, "a"])
    assert probabilities(rows)[1] == pytest.approx(probabilities(plain)[1], abs=2e-6), "it fits"
    done = paceline("evaluate", texts, "--tta", "windows")
    assert done.code == 0, done.err
    assert "a text is computed 2.2 times on average" in done.err
    assert done.out.startswith("test: 6 samples"), "the run's own split, of texts"


@pytest.mark.parametrize(
    ("run", "options", "told"),
    [
        ("texts", ["--tta", "flip"], "flip: no view of a text"),
        ("digits", ["--tta", "windows"], "windows: no view of an image"),
        ("digits", ["--tta", "flop"], "did you mean flip"),
        ("digits", ["--tta", "flip", "--set", "techniques.tta=[crop5]"], "is set twice"),
    ],
)
def test_what_cannot_be_is_refused(
    run: str, options: list[str], told: str, paceline: Paceline, request: pytest.FixtureRequest
) -> None:
    done = paceline("evaluate", request.getfixturevalue(run), *options)
    assert done.code == 2
    assert told in done.err.replace("'", "")


def test_training_on_views_of_texts_is_another_setting(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.overflow=windows"):
        train_run(tmp_path, model={"source": "absent"}, data={"source": "absent.csv"}, techniques={"tta": ["windows"]})
