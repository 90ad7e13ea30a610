"""Losses, weights, sampler and thresholds for rare labels, from the command line to predictions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.metrics import accuracy_score, f1_score

from paceline.models.saved import read_saved
from tests.e2e.commands import (
    BAD,
    GOOD,
    THINGS,
    Done,
    Paceline,
    read_csv,
    read_json_lines,
    write_csv,
    write_json_lines,
)
from tests.testing.tiny import tiny_bert_config

BERT = {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300}

Train = Callable[..., Done]


@pytest.fixture
def train(paceline: Paceline, tmp_path: Path) -> Train:
    """``train(data, task, *arguments)`` into the folder ``run``."""

    def run(data: Path, task: dict[str, Any], *arguments: object) -> Done:
        recipe = {
            "model": BERT,
            "data": {"source": data.name, "splits": {"validation": 0.3, "test": 0.3}},
            "task": task,
            "loop": {"epochs": 2, "batch_size": 8},
            "optimizer": {"lr": 1e-3},
            "observe": {"console": "plain"},
            "device": "cpu",
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return paceline("train", "recipe.yaml", "--out", "run", *arguments)

    return run


def mail(count: int = 100) -> list[dict[str, str]]:
    """One of six is spam, and most of its words are BAD ones."""
    draw, rows = random.Random(1), []
    for number in range(count):
        spam = number % 6 == 0
        words = [draw.choice(BAD if spam ^ (draw.random() < 0.3) else GOOD) for _ in range(3)]
        rows.append({"text": " ".join([*words, THINGS[number % 7], str(number)]), "label": "spam" if spam else "ham"})
    return rows


def summary(folder: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return found


def measured(done: Done) -> dict[str, float]:
    """What ``paceline evaluate`` printed."""
    assert done.code == 0, done.err
    return {name: float(value) for name, value in re.findall(r"^  (\w+) +([\d.]+)$", done.out, re.MULTILINE)}


def test_a_tuned_threshold_is_shown_saved_measured_and_predicted_by(
    paceline: Paceline, train: Train, tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "mail.csv", mail())
    done = train(data, {"threshold": "tuned", "class_weights": "balanced"})
    assert done.code == 0, done.err
    (threshold,) = read_saved(tmp_path / "run" / "model").thresholds
    assert threshold != 0.5, "these data do not show whether it is used"
    found = summary()
    assert found["thresholds"] == {"spam": threshold}
    assert f"thresholds  spam {threshold:.4g}" in done.out
    assert "predicted where its probability is above" in (tmp_path / "run" / "report.html").read_text()

    # evaluate measures what the run measured, and by another threshold something else
    for split in ("validation", "test"):
        again = measured(paceline("evaluate", "run", "--split", split))
        assert again == {name: pytest.approx(value, abs=1e-4) for name, value in found["final"][split].items()}
    for other in (0.001, 0.999):
        by_other = measured(paceline("evaluate", "run", "--set", f"task.threshold={other}"))
        assert by_other["accuracy"] != measured(paceline("evaluate", "run"))["accuracy"]

    # predict decides by the same number, and says the same of a model without its run
    done = paceline("predict", "run", data, "-o", "out.csv")
    assert done.code == 0, done.err
    rows = read_csv(tmp_path / "out.csv")
    predicted = [row["prediction"] for row in rows]
    scores = np.array([float(row["probability of spam"]) for row in rows])
    clear = np.abs(scores - threshold) > 1e-5  # as they are rounded in the file
    assert [label == "spam" for label in np.array(predicted)[clear]] == (scores > threshold)[clear].tolist()
    assert predicted != [("ham", "spam")[int(score > 0.5)] for score in scores], "one half says the same"
    whole = measured(paceline("evaluate", "run", "--data", data))
    truth = [row["label"] for row in rows]
    assert whole["accuracy"] == pytest.approx(accuracy_score(truth, predicted), abs=1e-4)
    assert whole["f1"] == pytest.approx(f1_score(truth, predicted, average="macro"), abs=1e-4)
    assert measured(paceline("evaluate", "run/model", "--data", data))["accuracy"] == whole["accuracy"]
    done = paceline("predict", "run", data, "-o", "half.csv", "--set", "task.threshold=0.5")
    assert done.code == 0, done.err
    halved = [row["prediction"] for row in read_csv(tmp_path / "half.csv")]
    assert halved == [("ham", "spam")[int(score > 0.5)] for score in scores]


def test_no_threshold_of_validation_is_better_and_test_has_no_part_in_it(
    paceline: Paceline, train: Train, tmp_path: Path
) -> None:
    rows = [{**row, "split": ("train", "validation", "test")[at % 3]} for at, row in enumerate(mail())]
    data = write_csv(tmp_path / "mail.csv", rows)
    assert train(data, {"threshold": "tuned"}).code == 0
    best = summary()["final"]["validation"]["f1"]
    for tried in np.linspace(0.05, 0.95, 7):
        command = ("evaluate", "run", "--split", "validation", "--set", f"task.threshold={tried}")
        assert measured(paceline(*command))["f1"] <= best + 1e-4
    before = summary()["thresholds"]
    (tmp_path / "run").rename(tmp_path / "first")
    others = {"ham": "spam", "spam": "ham"}
    turned = [{**row, "label": others[row["label"]]} if row["split"] == "test" else row for row in rows]
    write_csv(data, turned)
    assert train(data, {"threshold": "tuned"}).code == 0
    assert summary()["thresholds"] == before, "the labels of the test split have moved it"


def test_every_label_of_several_has_its_own(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    draw, topics = random.Random(2), ("art", "play", "sport")
    rows = [
        {"text": row["text"], "labels": [topic for at, topic in enumerate(topics) if draw.random() < 0.4 / (at + 1)]}
        for row in mail()
    ]
    data = write_json_lines(tmp_path / "topics.jsonl", rows)
    task = {"threshold": "tuned", "loss": "focal", "class_weights": "balanced", "metrics": ["f1", "auroc"]}
    done = train(data, task)
    assert done.code == 0, done.err
    thresholds = summary()["thresholds"]
    assert list(thresholds) == list(topics)
    assert len(set(thresholds.values())) > 1
    again = measured(paceline("evaluate", "run"))
    assert again == {name: pytest.approx(value, abs=1e-4) for name, value in summary()["final"]["test"].items()}
    assert paceline("predict", "run", data, "-o", "out.jsonl").code == 0
    for row in read_json_lines(tmp_path / "out.jsonl"):
        above = [topic for topic in topics if row[f"probability of {topic}"] > thresholds[topic]]
        near = any(abs(row[f"probability of {topic}"] - thresholds[topic]) < 1e-5 for topic in topics)
        assert near or row["prediction"] == above


def test_a_number_is_a_threshold_from_the_first_evaluation_on(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "mail.csv", mail())
    assert train(data, {"threshold": 0.999}).code == 0
    records = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        if record["kind"] == "evaluation":
            assert [row[1] for row in record["confusion"]] == [0, 0], "spam is predicted below the threshold"
    assert read_saved(tmp_path / "run" / "model").thresholds == (float(np.float32(0.999)),)
    assert {row["prediction"] for row in predictions(paceline, data)} == {"ham"}


def predictions(paceline: Paceline, data: Path) -> list[dict[str, str]]:
    done = paceline("predict", "run", data, "-o", "out.csv")
    assert done.code == 0, done.err
    return read_csv(Path("out.csv"))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ({"threshold": "tuned"}, ["data.splits.validation=0"], "no validation split"),
        ({"class_weights": {"ham": 1, "smap": 2}}, [], "did you mean 'spam'"),
        ({"class_weights": {"ham": 1}}, [], "task.class_weights.spam=1"),
        ({"class_weights": {"ham": 1, "spam": 0}}, [], "has to be a number above 0"),
        ({"class_weights": "blanced"}, [], "neither balanced nor a weight for every label"),
        ({"class_weights": "balanced"}, ["loop.sampler=balanced"], "made up for twice"),
        ({}, ["loop.sampler=balanced", "loop.shuffle=false"], "no order to keep"),
        ({"focal_gamma": 3.0}, [], "no effect without loss: focal"),
        ({"loss": "focal", "label_smoothing": 0.1}, [], "one label's probability"),
        ({"loss": "tests.golden.losses:cross_entropy", "label_smoothing": 0.1}, [], "the whole loss"),
        ({"loss": "tests.golden.losses:cross_entropy", "class_weights": "balanced"}, [], "the whole loss"),
        ({"loss": "fokal"}, [], "it is focal"),
        ({"label_smoothing": 1.0}, [], "less than 1"),
        ({"threshold": 1.5}, [], "less than 1"),
        ({"label_smoothing": 0.1}, ["model.train=features"], "no step is made"),
        ({}, ["loop.sampler=balanced", "model.train=features"], "no step is made"),
        ({"type": "regression", "label_smoothing": 0.1}, [], "a number has no classes"),
        ({"type": "regression", "threshold": "tuned"}, [], "a number has no classes"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_begins(
    task: dict[str, Any], settings: list[str], message: str, train: Train, tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "mail.csv", mail(60))
    done = train(data, task, *(word for setting in settings for word in ("--set", setting)))
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "a run has begun"


OF_CLASSES = {
    "task.label_smoothing": 0.1,
    "task.class_weights": "balanced",
    "task.loss": "focal",
    "task.threshold": "tuned",
    "loop.sampler": "balanced",
}


@pytest.mark.parametrize("setting", [f"{path}={value}" for path, value in OF_CLASSES.items()])
def test_numbers_have_no_classes(setting: str, train: Train, tmp_path: Path) -> None:
    """What the labels are is known once the data are read, and the model is not loaded by then."""
    rows = [{"text": row["text"], "label": f"{at / 7:.3f}"} for at, row in enumerate(mail(60))]
    done = train(write_csv(tmp_path / "numbers.csv", rows), {}, "--set", setting)
    assert done.code == 2, done.err
    assert f"{setting.partition('=')[0]} = " in done.err
    assert "a number has no classes" in done.err


def test_three_classes_have_no_threshold_and_a_saved_model_tunes_none(
    paceline: Paceline, train: Train, tmp_path: Path
) -> None:
    rows = [{**row, "label": "abc"[at % 3]} for at, row in enumerate(mail(60))]
    data = write_csv(tmp_path / "three.csv", rows)
    done = train(data, {"threshold": "tuned"})
    assert done.code == 2
    assert "of 3 classes the likeliest is predicted" in done.err
    assert train(data, {"class_weights": {"a": 1, "b": 2, "c": 3}, "label_smoothing": 0.1}).code == 0
    again = measured(paceline("evaluate", "run"))
    assert again["loss"] == pytest.approx(summary()["final"]["test"]["loss"], abs=1e-4), "evaluate weighs otherwise"
    for threshold, message in (("tuned", "nothing is tuned here"), ("0.3", "of 3 classes the likeliest is predicted")):
        done = paceline("evaluate", "run", "--set", f"task.threshold={threshold}")
        assert done.code == 2
        assert message in done.err


def test_balanced_weights_are_told_and_evaluate_weighs_by_them(
    paceline: Paceline, train: Train, tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "mail.csv", mail())
    done = train(data, {"class_weights": "balanced"})
    assert done.code == 0, done.err
    labels = [record for record in read_json_lines(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    assert labels[0]["counted"] == 8, "accuracy is of labels, not of their weights"
    weights = read_saved(tmp_path / "run" / "model").class_weights
    assert f"ham {weights[0]:.4g}, spam {weights[1]:.4g}" in done.out
    found = measured(paceline("evaluate", "run"))
    assert found["loss"] == pytest.approx(summary()["final"]["test"]["loss"], abs=1e-4)
    # one sample alone has the weighted mean of its own loss: the weights of other data are not asked for
    spam = write_csv(tmp_path / "spam.csv", [row for row in mail() if row["label"] == "spam"][:3])
    assert measured(paceline("evaluate", "run", "--data", spam))["loss"] > 0
