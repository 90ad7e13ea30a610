"""Every kind of task, source and way of fine-tuning, from the command line to a model that plain transformers loads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from paceline.models.saved import read_saved
from paceline.run_folder import RunFolder
from tests.e2e.commands import Done, Paceline, read_json_lines, reviews, write_csv, write_json_lines
from tests.testing.tiny import (
    tiny_bert_config,
    tiny_distilbert_config,
    tiny_resnet_config,
    tiny_vit_config,
    write_tiny_model,
)

# large weights, so that every input makes a difference that can be seen
BERT = {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300}
DISTILBERT = {"config": tiny_distilbert_config(initializer_range=0.3), "vocabulary_size": 300}

Train = Callable[..., Path]
"""``train(recipe, *arguments)`` -> the run's folder."""


@pytest.fixture
def train(paceline: Paceline, tmp_path: Path) -> Train:
    """Trains by a recipe file in a folder of its own, and checks what every run has to leave."""
    count = 0

    def run(recipe: dict[str, Any], *arguments: object) -> Path:
        nonlocal count
        count += 1
        settings = {"loop": {"epochs": 2, "batch_size": 8}, "optimizer": {"lr": 1e-3}, "observe": {"console": "plain"}}
        whole = {key: {**settings.get(key, {}), **recipe.get(key, {})} for key in {**settings, **recipe}}
        (tmp_path / f"recipe{count}.yaml").write_text(yaml.safe_dump(whole))
        folder = tmp_path / f"run{count}"
        done = paceline("train", f"recipe{count}.yaml", "--out", folder, *arguments)
        assert done.code == 0, done.err
        check_folder(folder, done)
        return folder

    return run


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def check_folder(folder: Path, done: Done) -> None:
    """All files are there and tell the same."""
    found = summary(folder)
    for name in ("recipe.yaml", "manifest.json", "metrics.jsonl", "report.html", "model/model.safetensors"):
        assert (folder / name).stat().st_size, f"{name} is missing or empty"
    records = read_json_lines(folder / "metrics.jsonl")
    measured = [(record["split"], record["step"]) for record in records if record["kind"] == "evaluation"]
    assert len(set(measured)) == len(measured), "the same weights are measured twice"
    kinds = [record["kind"] for record in records]
    assert kinds.count("step") == found["steps"], "a step is missing from metrics.jsonl"
    assert found["status"] in done.out
    for value in found["final"].get("test", {}).values():
        assert np.isfinite(float(value)), f"{found['final']}"


def check_evaluate(paceline: Paceline, folder: Path, *, trusts: bool = False) -> None:
    """``evaluate`` measures on the saved model what the run measured."""
    from paceline import evaluate

    for split, metrics in summary(folder)["final"].items():
        record = evaluate(folder, split=split, trust_references=trusts)
        # some CPUs round a product otherwise where its operands lie otherwise in memory
        expected = pytest.approx(metrics, rel=1e-6)
        assert {"loss": record.loss, **record.metrics} == expected, f"{split} differs from summary.json"


def check_runs_again(paceline: Paceline, folder: Path, *switches: str) -> None:
    """recipe.yaml is a whole recipe: the same run again; and settings on top of it work."""
    again, shorter = folder.with_name(f"{folder.name}-again"), folder.with_name(f"{folder.name}-shorter")
    done = paceline("train", folder / "recipe.yaml", "--out", again, *switches)
    assert done.code == 0, done.err
    assert summary(again)["final"] == summary(folder)["final"]
    assert (again / "recipe.yaml").read_text() == (folder / "recipe.yaml").read_text()
    if summary(folder)["steps"]:
        done = paceline("train", folder / "recipe.yaml", "--out", shorter, "--set", "loop.max_steps=3", *switches)
        assert done.code == 0, done.err
        assert summary(shorter)["steps"] == 3


def transformers_scores(folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None) -> np.ndarray:
    """Logits [n, C] of the saved model in plain transformers, each text on its own."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    length = read_saved(folder / "model").max_length
    rows = []
    for at, text in enumerate(texts):
        second = pairs[at] if pairs else None
        inputs = tokenizer(text, second, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].numpy())
    return np.stack(rows)


def predicted(paceline: Paceline, folder: Path, data: Path | str, *switches: str) -> list[dict[str, Any]]:
    out = folder.with_name(f"{folder.name}-predicted.jsonl")
    done = paceline("predict", folder, data, "-o", out, *switches)
    assert done.code == 0, done.err
    return read_json_lines(out)


def check_probabilities(rows: list[dict[str, Any]], logits: np.ndarray, names: Sequence[str], *, sigmoid: bool) -> None:
    """What ``predict`` wrote is what transformers computes."""
    powers = np.exp(logits.astype(np.float64))
    expected = powers / (1 + powers) if sigmoid else powers / powers.sum(-1, keepdims=True)
    found = np.array([[row[f"probability of {name}"] for name in names] for row in rows])
    np.testing.assert_allclose(found, expected, atol=5e-6)
    if sigmoid:
        chosen = [[name for name, score in zip(names, scores, strict=True) if score > 0.5] for scores in expected]
    else:
        chosen = [names[best] for best in expected.argmax(-1)]
    assert [row["prediction"] for row in rows] == chosen


def check_saved_names(folder: Path, names: Sequence[str]) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    assert config["id2label"] == {str(index): name for index, name in enumerate(names)}
    assert config["label2id"] == {name: index for index, name in enumerate(names)}


# ---- tasks


def test_one_label_a_text(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    names = ("schlecht", "très bon", "好")
    rows = reviews(60, names)
    data = write_csv(tmp_path / "data.csv", rows)
    folder = train({"model": BERT, "data": {"source": "data.csv"}, "loop": {"epochs": 3}})
    assert summary(folder)["final"].keys() == {"validation", "test"}
    assert (folder / "checkpoints").is_dir()
    ordered = sorted(names)
    check_saved_names(folder, ordered)
    found = predicted(paceline, folder, data)
    check_probabilities(found, transformers_scores(folder, [r["text"] for r in rows]), ordered, sigmoid=False)
    check_evaluate(paceline, folder)
    check_runs_again(paceline, folder)


def test_one_label_in_all(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "reviews.csv", reviews(20, labels=["film"]))
    folder = train({"model": BERT, "data": {"source": str(data), "allow_single_class": True}})
    check_evaluate(paceline, folder)
    rows = predicted(paceline, folder, data)
    assert [row["prediction"] for row in rows] == ["film"] * 20
    check_probabilities(rows, transformers_scores(folder, [row["text"] for row in rows]), ["film"], sigmoid=False)
    check_saved_names(folder, ["film"])


def test_pairs_reach_bert_with_their_token_types(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    rows = [
        {"premise": row["text"], "hypothesis": f"it was {THEN[at % 3]}", "label": str(at % 3)}
        for at, row in enumerate(reviews(45))
    ]
    data = write_csv(tmp_path / "data.csv", rows)
    first, second = [r["premise"] for r in rows], [r["hypothesis"] for r in rows]
    for model in (BERT, DISTILBERT):
        folder = train({"model": model, "data": {"source": "data.csv"}})
        found = predicted(paceline, folder, data)
        logits = transformers_scores(folder, first, second)
        check_probabilities(found, logits, "012", sigmoid=False)
        check_evaluate(paceline, folder)


THEN = ("good", "bad", "long")


def test_token_types_are_not_lost(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    """With the types of the second text left out, BERT computes something else: the check above would see it."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [{"sentence1": r["text"], "sentence2": "and so on", "label": r["label"]} for r in reviews()]
    write_csv(tmp_path / "data.csv", rows)
    folder = train({"model": BERT, "data": {"source": "data.csv"}})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    inputs = tokenizer(rows[0]["sentence1"], rows[0]["sentence2"], return_tensors="pt")
    with torch.no_grad():
        right = model(**inputs).logits
        wrong = model(**{**inputs, "token_type_ids": torch.zeros_like(inputs["token_type_ids"])}).logits
    assert (right - wrong).abs().max() > 1e-4


@pytest.mark.parametrize(
    "form",
    [pytest.param("lists", marks=pytest.mark.slow), pytest.param("separator", marks=pytest.mark.slow), "columns"],
)
def test_several_labels_a_text(paceline: Paceline, train: Train, tmp_path: Path, form: str) -> None:
    topics = ("art", "play", "sport")
    chosen = [[topic for bit, topic in enumerate(topics) if number >> bit & 1] for number in range(48)]
    texts = [row["text"] for row in reviews(48)]
    settings: dict[str, Any] = {}
    if form == "lists":
        data = write_json_lines(
            tmp_path / "data.jsonl", ({"text": t, "labels": c} for t, c in zip(texts, chosen, strict=True))
        )
    elif form == "separator":
        rows = [{"text": t, "labels": "; ".join(c)} for t, c in zip(texts, chosen, strict=True)]
        data = write_csv(tmp_path / "data.csv", rows)
        settings = {"label_separator": ";"}
    else:
        rows = [
            {"text": t, **{topic: str(int(topic in c)) for topic in topics}} for t, c in zip(texts, chosen, strict=True)
        ]
        data = write_csv(tmp_path / "data.csv", rows)
        settings = {"label": list(topics)}
    folder = train({"model": BERT, "data": {"source": data.name, **settings}})
    check_saved_names(folder, topics)
    assert summary(folder)["final"]["test"].keys() == {"loss", "f1", "accuracy"}
    found = predicted(paceline, folder, data)
    check_probabilities(found, transformers_scores(folder, texts), topics, sigmoid=True)
    check_evaluate(paceline, folder)


def test_a_number_a_text(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "score": f"{at % 10 / 7:.3f}"} for at, row in enumerate(reviews(50))]
    data = write_csv(tmp_path / "data.csv", rows)
    folder = train({"model": BERT, "data": {"source": "data.csv"}})
    assert summary(folder)["final"]["test"].keys() == {"loss", "mse", "mae"}
    found = predicted(paceline, folder, data)
    logits = transformers_scores(folder, [row["text"] for row in rows])
    np.testing.assert_allclose([row["prediction"] for row in found], logits[:, 0], atol=5e-6)
    assert found[0].keys() == {"text", "score", "prediction"}
    check_saved_names(folder, ["score"])
    check_evaluate(paceline, folder)


# ---- images


def write_images(folder: Path, count: int, classes: Sequence[str], side: int, mode: str = "RGB") -> Path:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        name = classes[number % len(classes)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        shape = (side, side, 3) if mode == "RGB" else (side, side)
        pixels = random.integers(0, 256, shape, dtype=np.uint8) // 2 + 100 * (number % len(classes))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
    return folder


def image_scores(folder: Path, files: Sequence[Path]) -> np.ndarray:
    """Logits of the saved model and image processor in plain transformers."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageClassification, ViTImageProcessor

    processor = ViTImageProcessor.from_pretrained(folder / "model")
    model = AutoModelForImageClassification.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        return np.concatenate(
            [model(**processor(Image.open(file), return_tensors="pt")).logits.numpy() for file in files]
        )


@pytest.mark.parametrize(("config", "side"), [(tiny_vit_config(), 8), (tiny_resnet_config(), 32)])
def test_a_folder_of_images_a_class(
    paceline: Paceline, train: Train, tmp_path: Path, config: dict[str, Any], side: int
) -> None:
    data = write_images(tmp_path / "pictures", 40, ("cat", "dog"), side)
    folder = train({"model": {"config": config}, "data": {"source": "pictures"}})
    check_saved_names(folder, ("cat", "dog"))
    found = predicted(paceline, folder, data)
    files = [data / row["file"] for row in found]
    assert sorted(files) == sorted(data.glob("*/*.png"))
    check_probabilities(found, image_scores(folder, files), ("cat", "dog"), sigmoid=False)
    check_evaluate(paceline, folder)
    check_runs_again(paceline, folder)


def test_a_table_of_pictures_is_as_a_folder_of_them(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    data = write_images(tmp_path / "pictures", 40, ("cat", "dog"), 8)
    files = sorted(path.relative_to(tmp_path) for path in data.glob("*/*.png"))
    lines = ["file_name,label", *(f"{path},{path.parent.name}" for path in files)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    folder = train({"model": {"config": tiny_vit_config()}, "data": {"source": "table.csv"}})
    by_table, by_folder = predicted(paceline, folder, tmp_path / "table.csv"), predicted(paceline, folder, data)
    assert [row["file_name"] for row in by_table] == list(map(str, files))
    assert [row["prediction"] for row in by_table] == [row["prediction"] for row in by_folder]
    check_evaluate(paceline, folder)
    done = paceline("evaluate", folder, "--data", "table.csv")
    assert done.code == 0, done.err


def test_images_are_resized_for_training_and_for_prediction_alike(
    paceline: Paceline, train: Train, tmp_path: Path
) -> None:
    write_images(tmp_path / "pictures", 40, ("cat", "dog"), 20)
    folder = train({"model": {"config": tiny_vit_config()}, "data": {"source": "pictures", "image_size": 8}})
    check_evaluate(paceline, folder)
    larger = write_images(tmp_path / "larger", 6, ("x",), 30)
    assert len(predicted(paceline, folder, larger)) == 6
    grey = write_images(tmp_path / "grey", 6, ("x",), 8, "L")
    assert len(predicted(paceline, folder, grey)) == 6, "grey images have three equal channels"


def test_images_of_another_size_are_brought_to_the_models(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_images(tmp_path / "pictures", 40, ("cat", "dog"), 8)
    folder = train({"model": {"config": tiny_vit_config()}, "data": {"source": "pictures"}})
    assert len(predicted(paceline, folder, write_images(tmp_path / "larger", 6, ("cat", "dog"), 12))) == 6
    done = paceline("evaluate", folder, "--data", "larger")
    assert done.code == 0, done.err


def test_colour_images_are_refused_by_a_model_of_grey_ones(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_images(tmp_path / "pictures", 40, ("cat", "dog"), 8, "L")
    folder = train({"model": {"config": tiny_vit_config()}, "data": {"source": "pictures"}})
    write_images(tmp_path / "colour", 6, ("cat", "dog"), 8)
    for command in (("predict", folder, "colour", "-o", "out.csv"), ("evaluate", folder, "--data", "colour")):
        done = paceline(*command)
        assert done.code == 2, done
        assert "in colour" in done.err
        assert "grey" in done.err
    assert not (tmp_path / "out.csv").exists()


def test_builtin_digits(paceline: Paceline, train: Train) -> None:
    small = {"source": "builtin:digits", "splits": {"train": 120, "validation": 30, "test": 40}}
    folder = train({"model": {"config": tiny_vit_config()}, "data": small, "loop": {"epochs": 1, "batch_size": 32}})
    check_saved_names(folder, "0123456789")
    assert len(predicted(paceline, folder, "builtin:digits")) == 1797
    check_evaluate(paceline, folder)


@pytest.mark.parametrize(
    ("model", "random"),
    [
        ({"config": tiny_bert_config()}, {"length": [4, 60], "vocabulary": 500}),
        pytest.param(
            {"config": tiny_distilbert_config()},
            {"length": 20, "vocabulary": 500, "classes": 3},
            marks=pytest.mark.slow,
        ),
        ({"config": tiny_resnet_config()}, {"image": [32, 32, 3]}),
        pytest.param({"config": tiny_vit_config()}, {"image": [8, 8, 1]}, marks=pytest.mark.slow),
    ],
)
def test_builtin_random(paceline: Paceline, train: Train, model: dict[str, Any], random: dict[str, Any]) -> None:
    folder = train({"model": model, "data": {"source": "builtin:random", "random": {"samples": 48, **random}}})
    check_evaluate(paceline, folder)
    assert len(predicted(paceline, folder, "builtin:random")) == 48


@pytest.mark.slow
def test_builtin_docstrings(paceline: Paceline, train: Train) -> None:
    splits = {"train": 400, "validation": 100, "test": 100}
    folder = train({"model": BERT, "data": {"source": "builtin:docstrings", "splits": splits}, "loop": {"epochs": 1}})
    check_evaluate(paceline, folder)
    assert len(read_saved(folder / "model").label_names) >= 4


# ---- sources


def test_every_text_format_gives_the_same_run(train: Train, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = reviews(40)
    write_csv(tmp_path / "data.csv", rows)
    write_csv(tmp_path / "data.tsv", rows, "\t")
    lines = write_json_lines(tmp_path / "data.jsonl", rows)
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "zipped.csv.gz").write_bytes(gzip.compress((tmp_path / "data.csv").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    finals = {}
    for name in ("data.csv", "data.tsv", "data.jsonl", "zipped.jsonl.gz", "zipped.csv.gz", "data.parquet"):
        finals[name] = summary(train({"model": BERT, "data": {"source": name}}))["final"]
    assert all(final == finals["data.csv"] for final in finals.values()), finals


def test_a_folder_of_texts_a_class_as_in_acl_imdb(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    for number, row in enumerate(reviews(48)):
        split = "test" if number % 4 == 3 else "train"
        place = tmp_path / "aclImdb" / split / ("neg", "pos")[number % 2 if split == "train" else number // 4 % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(row["text"])
    unsupervised = tmp_path / "aclImdb/train/unsup"
    unsupervised.mkdir()
    (unsupervised / "0.txt").write_text("nobody knows")
    folder = train({"model": BERT, "data": {"source": "aclImdb"}})
    manifest = RunFolder.view(folder).read_manifest()
    assert manifest["starts"][0]["data_fingerprint"]
    started = next(r for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "start")
    assert started["samples"] == {"train": 32, "validation": 4, "test": 12}
    assert any("unsup" in notice for notice in summary(folder)["notices"])
    check_evaluate(paceline, folder)


def test_splits_by_column_by_files_and_by_counts(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    rows = reviews(60)
    names = ["train"] * 40 + ["dev"] * 8 + ["test"] * 12
    write_csv(tmp_path / "column.csv", ({**row, "split": name} for row, name in zip(rows, names, strict=True)))
    write_csv(tmp_path / "train.csv", rows[:40])
    write_csv(tmp_path / "validation.csv", rows[40:48])
    write_csv(tmp_path / "test.csv", rows[48:])
    by_column = train({"model": BERT, "data": {"source": "column.csv"}})
    by_files = train(
        {"model": BERT, "data": {"source": "train.csv", "validation": "validation.csv", "test": "test.csv"}}
    )
    assert summary(by_column)["final"] == summary(by_files)["final"]
    counts = {"source": "column.csv", "split": None, "splits": {"train": 30, "validation": 10, "test": 20}}
    by_counts = train({"model": BERT, "data": counts})
    for folder, sizes in ((by_column, (40, 8, 12)), (by_files, (40, 8, 12)), (by_counts, (30, 10, 20))):
        started = next(r for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "start")
        assert tuple(started["samples"].values()) == sizes
        check_evaluate(paceline, folder)


# ---- the user's own parts


OWN = """
import torch
from torch import nn


def text_model(num_labels):
    return Bag(num_labels)


class Bag(nn.Module):
    def __init__(self, num_labels):
        super().__init__()
        self.words, self.head = nn.Embedding(8000, 8), nn.Linear(8, num_labels)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))


def image_model(num_labels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_labels))


def squared(logits, labels):
    return (1 - logits.softmax(-1)[torch.arange(len(labels)), labels]).square()


def share_of_first(scores, labels):
    return float((scores.argmax(-1) == 0).float().mean())


def saw(step, total_steps):
    return 1 - step % 4 / 4
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, of a name that no other test has imported."""
    import sys

    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_users_models(paceline: Paceline, train: Train, tmp_path: Path, own: str) -> None:
    data = write_csv(tmp_path / "data.csv", reviews())
    tokenizer = write_tiny_model(tmp_path / "bert")
    texts = {"model": {"factory": f"{own}:text_model", "tokenizer": str(tokenizer)}, "data": {"source": "data.csv"}}
    small = {"source": "builtin:digits", "splits": {"train": 120, "validation": 30, "test": 40}}
    images = {"model": {"factory": f"{own}:image_model"}, "data": small}
    for recipe, source in ((texts, data), (images, "builtin:digits")):
        folder = train(recipe)
        check_evaluate(paceline, folder, trusts=True)
        found = predicted(paceline, folder, source, "--trust-references")
        names = read_saved(folder / "model").label_names
        assert {row["prediction"] for row in found} <= set(names)
        sums = [sum(row[f"probability of {name}"] for name in names) for row in found]
        np.testing.assert_allclose(sums, 1, atol=1e-5)


def test_a_users_loss_metric_and_schedule(paceline: Paceline, train: Train, tmp_path: Path, own: str) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    data = {"source": "data.csv"}
    plain = train({"model": BERT, "data": data})
    folder = train(
        {
            "model": BERT,
            "data": data,
            "task": {"loss": f"{own}:squared", "metrics": ["accuracy", "auroc", f"{own}:share_of_first"]},
            "schedule": {"type": f"{own}:saw"},
        }
    )
    final = summary(folder)["final"]["test"]
    assert final.keys() == {"loss", "accuracy", "auroc", "share_of_first"}
    assert final["loss"] != summary(plain)["final"]["test"]["loss"]
    rates = [r["learning_rates"][0] for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "step"]
    assert rates == [1e-3 * (1 - step % 4 / 4) for step in range(8)]
    check_evaluate(paceline, folder, trusts=True)
    check_runs_again(paceline, folder, "--trust-references")


# ---- ways of fine-tuning


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(folder / "model.safetensors")
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name, value in after.items() if name not in before or not value.equal(before[name])}


def test_training_a_part_leaves_the_rest_alone(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    write_tiny_model(tmp_path / "bert", tiny_bert_config(initializer_range=0.3))
    before = weights(tmp_path / "bert")
    found = {}
    for part in ("head", "last:1", "all"):
        recipe = {"model": {"source": "bert", "train": part}, "data": {"source": "data.csv"}}
        folder = train(recipe, "--set", "loop.save_best=false")
        found[part] = changed(before, weights(folder / "model"))
        check_evaluate(paceline, folder)
        started = next(r for r in read_json_lines(folder / "metrics.jsonl") if r["kind"] == "start")
        assert (started["num_trained_parameters"] < started["num_parameters"]) == (part != "all")
    assert found["head"] == {"classifier.weight", "classifier.bias"}
    assert any(".layer.1." in name for name in found["last:1"])
    assert not any(".layer.0." in name or "embeddings" in name for name in found["last:1"])
    assert any("embeddings" in name for name in found["all"])


@pytest.mark.parametrize("classifier", [pytest.param("logistic", marks=pytest.mark.slow), "svm"])
def test_features_fit_a_classifier_into_a_plain_model(
    paceline: Paceline, train: Train, tmp_path: Path, classifier: str
) -> None:
    rows = reviews(60)
    data = write_csv(tmp_path / "data.csv", rows)
    write_tiny_model(tmp_path / "bert", tiny_bert_config(initializer_range=0.3))
    model = {"source": "bert", "train": "features", "classifier": classifier}
    folder = train({"model": model, "data": {"source": "data.csv"}})
    assert summary(folder)["steps"] == 0
    assert changed(weights(tmp_path / "bert"), weights(folder / "model")) == {"classifier.weight", "classifier.bias"}
    found = predicted(paceline, folder, data)
    logits = transformers_scores(folder, [row["text"] for row in rows])
    check_probabilities(found, logits, ("negative", "positive"), sigmoid=False)
    right = np.mean([row["prediction"] == row["label"] for row in found])
    assert right > 0.7, "the fitted layer tells nothing apart"
    check_evaluate(paceline, folder)
    check_runs_again(paceline, folder)


def test_parameter_groups_with_schedules_of_their_own(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    groups = [{"match": "*classifier*", "lr": 1e-2, "schedule": {"type": "constant", "warmup": 0}, "weight_decay": 0}]
    optimizer = {"lr": 1e-3, "groups": groups, "weight_decay": 0.1}
    schedule = {"type": "cosine", "warmup": 2}
    folder = train({"model": BERT, "data": {"source": "data.csv"}, "optimizer": optimizer, "schedule": schedule})
    records = read_json_lines(folder / "metrics.jsonl")
    names = next(r for r in records if r["kind"] == "start")["group_names"]
    assert names == ["*classifier*", "rest", "rest (no decay)"]
    rates = np.array([r["learning_rates"] for r in records if r["kind"] == "step"])
    assert (rates[:, 0] == 1e-2).all(), "the group stays constant"
    assert rates[0, 1] == 0
    assert rates[2, 1] == 1e-3, "the rest warms up over two steps"
    assert (np.diff(rates[2:, 1]) < 0).all()


@pytest.mark.slow
def test_ways_of_computing_the_same(train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    recipe = {"model": BERT, "data": {"source": "data.csv"}}
    plain = summary(train(recipe))["final"]
    assert summary(train(recipe, "--set", "techniques.recompute=true"))["final"] == plain, "recompute is bit-exact"
    pieces = summary(train(recipe, "--set", "loop.micro_batch_size=3"))["final"]
    for split, metrics in plain.items():
        assert pieces[split]["accuracy"] == metrics["accuracy"]
        assert pieces[split]["loss"] == pytest.approx(metrics["loss"], rel=1e-4), "micro-batches add up to the batch"


@pytest.mark.slow
def test_early_stopping_and_the_last_weights(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    recipe = {"model": BERT, "data": {"source": "data.csv"}, "optimizer": {"lr": 1e-12}, "loop": {"epochs": 9}}
    folder = train(recipe, "--set", "loop.early_stopping.patience=2")
    found = summary(folder)
    assert (found["status"], found["epochs"], found["best_step"]) == ("stopped early", 3, 4)
    check_evaluate(paceline, folder)
    last = train({**recipe, "optimizer": {"lr": 1e-3}, "loop": {"epochs": 3, "save_best": False}})
    newest = summary(last)["evaluations"][-1]
    assert summary(last)["final"]["validation"] == {"loss": newest["loss"], **newest["metrics"]}
    check_evaluate(paceline, last)


def test_a_model_that_was_better_is_told_of(train: Train, tmp_path: Path, own: str) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    # it falls from evaluation to evaluation, as accuracy does in a run that diverges
    with (tmp_path / f"{own}.py").open("a") as file:
        file.write("\nfound = []\ndef falling(scores, labels):\n    found.append(0)\n    return 1 / len(found)\n")
    recipe = {"model": BERT, "data": {"source": "data.csv"}, "task": {"metrics": [f"{own}:falling"]}}
    for keeps in (False, True):
        folder = train({**recipe, "loop": {"epochs": 2, "best_metric": "falling", "save_best": keeps}})
        told = [notice for notice in summary(folder)["notices"] if "validation falling went from" in notice]
        assert [notice.partition(": ")[2] for notice in told] == (
            [] if keeps else ["the last weights are saved; loop.save_best=true keeps the best"]
        )


def test_tensorboard(train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    folder = train({"model": BERT, "data": {"source": "data.csv"}}, "--set", "observe.tensorboard=true")
    (events,) = (folder / "tensorboard").glob("events.out.tfevents.*")
    assert events.stat().st_size > 500


def test_a_data_set_that_fits_no_batch_trains_and_says_so(paceline: Paceline, train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews(20))
    folder = train({"model": BERT, "data": {"source": "data.csv"}, "loop": {"batch_size": 32}})
    assert summary(folder)["steps"] == 2
    assert any("16 training samples are fewer than loop.batch_size = 32" in n for n in summary(folder)["notices"])


def test_splits_too_small_to_have_a_row_are_told(train: Train, tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews(4))
    folder = train({"model": BERT, "data": {"source": "data.csv"}})
    assert any("validation has no rows" in notice for notice in summary(folder)["notices"])
