"""Checkpoints that know their classes: heads are kept, matched and told of, from the command line to the summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.commands import Paceline, read_csv, write_csv
from tests.testing.marks import slow_except
from tests.testing.tiny import tiny_bert_config, write_tiny_model

WORDS = {"entailment": "wonderful", "neutral": "evening", "contradiction": "dull"}
MEANT = ("entailment", "neutral", "contradiction")


def write_confident(folder: Path, head: Sequence[str], order: Sequence[str] = MEANT) -> Path:
    """A checkpoint that is right and sure about every text; its rows mean ``order`` and are called ``head``.

    With 16 numbers a text and fewer texts, some final layer gives each text the logits that are wanted.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_tiny_model(folder, tiny_bert_config(initializer_range=0.5), num_labels=len(order))
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = torch.tensor([[10.0 if name == meant else -10.0 for name in order] for _, meant in texts()])
    with torch.no_grad():
        pooled = torch.cat([model.bert(**tokenizer(text, return_tensors="pt")).pooler_output for text, _ in texts()])
        model.classifier.weight.copy_(torch.linalg.lstsq(pooled.double(), wanted.double(), driver="gelsd").solution.T)
        model.classifier.bias.zero_()
        sure = model(**tokenizer(texts()[0][0], return_tensors="pt")).logits
    assert (sure[0] - wanted[0]).abs().max() < 1, "the layer that was solved for does not give what is wanted"
    model.config.id2label = dict(enumerate(head))
    model.config.label2id = {name: row for row, name in enumerate(head)}
    model.save_pretrained(folder)
    return folder


def texts() -> list[tuple[str, str]]:
    """Twelve texts and what each means."""
    endings = ("a film", "the music", "the plot was thin", "we laughed")
    return [(f"{word} {ending}", meant) for ending in endings for meant, word in WORDS.items()]


def rows(names: dict[str, str] | None = None) -> list[dict[str, str]]:
    """Six texts to train on, three to validate and three to test with; labels are called by ``names``."""
    splits = ["train"] * 6 + ["validation"] * 3 + ["test"] * 3
    called = names or {}
    return [
        {"text": text, "label": called.get(meant, meant), "split": split}
        for (text, meant), split in zip(texts(), splits, strict=True)
    ]


def train(paceline: Paceline, model: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The summary of a run that hardly moves the weights, and what it printed."""
    out = Path(f"{model.name}-run")
    hardly = ("--lr", "1e-7", "--epochs", "1", "--batch-size", "3", "--set", "observe.console=plain")
    done = paceline("train", "--model", model, "--data", "data.csv", "--out", out, *hardly, *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found, done.out + done.err


@pytest.mark.parametrize(
    ("head", "names", "told"),
    [
        (MEANT, {}, ""),
        (("ENTAILMENT", "NEUTRAL", "CONTRADICTION"), {}, ""),
        (MEANT, {name: str(row) for row, name in enumerate(MEANT)}, "by number: 0 is entailment"),
        (("LABEL_0", "LABEL_1", "LABEL_2"), {name: str(row) for row, name in enumerate(MEANT)}, "0 is LABEL_0"),
        (("LABEL_0", "LABEL_1", "LABEL_2"), {name: f"LABEL_{row}" for row, name in enumerate(MEANT)}, ""),
    ],
)
def test_a_head_that_knows_its_classes_is_right_from_the_start(
    paceline: Paceline, tmp_path: Path, head: tuple[str, ...], names: dict[str, str], told: str
) -> None:
    """Sorted by name the classes would have each other's rows, and an accuracy of 0.33 or 0."""
    model = write_confident(tmp_path / "model", head)
    write_csv(tmp_path / "data.csv", rows(names))
    found, printed = train(paceline, model)
    assert {split: measured["accuracy"] for split, measured in found["final"].items()} == {
        "validation": 1.0,
        "test": 1.0,
    }
    report = (tmp_path / "model-run" / "report.html").read_text()
    assert ("number" in " ".join(found["notices"])) == bool(told)
    for place in (" ".join(found["notices"]), printed, report):
        assert told in place


@pytest.mark.parametrize(
    ("head", "names"),
    [(MEANT, {}), (("LABEL_0", "LABEL_1", "LABEL_2"), {name: str(row) for row, name in enumerate(MEANT)})],
    ids=["names", "numbers"],
)
def test_classes_that_do_not_occur_keep_their_rows(
    paceline: Paceline, tmp_path: Path, head: tuple[str, ...], names: dict[str, str]
) -> None:
    model = write_confident(tmp_path / "model", head)
    write_csv(
        tmp_path / "data.csv", [row for row, (_, meant) in zip(rows(names), texts(), strict=True) if meant != "neutral"]
    )
    found, printed = train(paceline, model)
    assert found["final"]["test"]["accuracy"] == 1.0
    absent = names.get("neutral", "neutral")
    assert f"the model's head is kept whole; train has no sample of '{absent}'" in " ".join(found["notices"])
    assert "is kept whole" in printed
    saved = json.loads((tmp_path / "model-run" / "model" / "config.json").read_text())
    assert saved["id2label"]["1"] == absent


@pytest.mark.parametrize("observed", [(), ("--set", "observe.baseline=tfidf")], ids=["alone", "beside a baseline"])
def test_a_class_that_only_the_head_and_later_splits_have_is_measured(
    paceline: Paceline, tmp_path: Path, observed: tuple[str, ...]
) -> None:
    model = write_confident(tmp_path / "model", MEANT)
    kept = [row for row in rows() if row["split"] != "train" or row["label"] != "neutral"]
    # one row of validation is called neutral and is not: the model is wrong about that one alone
    kept = [{**row, "label": "neutral"} if row["text"] == texts()[6][0] else row for row in kept]
    write_csv(tmp_path / "data.csv", kept)
    found, printed = train(paceline, model, *observed)
    assert "train has no sample of 'neutral'" in printed
    assert found["final"]["test"]["accuracy"] == 1.0
    assert found["final"]["test"]["f1"] == 1.0
    assert found["final"]["validation"]["accuracy"] == pytest.approx(2 / 3)
    # entailment: predicted once, never right; neutral: half found, always right; contradiction: right
    assert found["final"]["validation"]["f1"] == pytest.approx((0 + 2 / 3 + 1) / 3)
    assert bool(found["baseline"]) == bool(observed), "the baseline reads the texts again, and refuses the class"
    for asked in (("--split", "validation"), ("--data", "validation.csv")):
        write_csv(tmp_path / "validation.csv", [row for row in kept if row["split"] == "validation"])
        evaluated = paceline("evaluate", "model-run", *asked)
        assert evaluated.code == 0, evaluated.err
        assert "0.6667" in evaluated.out, f"{asked}: {evaluated.out}"


def test_what_is_lost_of_a_head_is_told(paceline: Paceline, tmp_path: Path) -> None:
    model = write_confident(tmp_path / "model", MEANT)
    names = {"entailment": "yes", "neutral": "maybe", "contradiction": "no"}
    write_csv(tmp_path / "data.csv", rows(names))
    found, printed = train(paceline, model)
    told = "its head for 3 classes (entailment, neutral, contradiction) is lost; a new head for maybe, no, yes starts"
    assert any(told in notice for notice in found["notices"])
    assert told in printed.replace("\n", " ")
    assert told in (tmp_path / "model-run" / "report.html").read_text()


@pytest.mark.parametrize(
    "order", slow_except([MEANT, MEANT[::-1], ("neutral", "entailment", "contradiction")], MEANT[::-1])
)
def test_what_is_encoded_for_one_head_is_not_another_ones(
    paceline: Paceline, tmp_path: Path, order: tuple[str, ...]
) -> None:
    """Same data, same tokenizer, other rows: out of the cache would come the first one's targets."""
    write_csv(tmp_path / "data.csv", rows())
    for at, each in enumerate((MEANT, order, MEANT)):
        model = write_confident(tmp_path / f"model{at}", each, each)
        found, _ = train(paceline, model)
        assert found["final"]["test"]["accuracy"] == 1.0
        assert json.loads((tmp_path / f"model{at}-run/model/paceline.json").read_text())["label_names"] == list(each)


def test_a_model_without_names_is_measured_on_numbers(paceline: Paceline, tmp_path: Path) -> None:
    write_confident(tmp_path / "model", ("LABEL_0", "LABEL_1", "LABEL_2"))
    for names in (("0", "1", "2"), ("0.0", "1.0", "2.0"), ("LABEL_0", "LABEL_1", "LABEL_2")):
        write_csv(tmp_path / "data.csv", rows(dict(zip(MEANT, names, strict=True))))
        done = paceline("evaluate", "model", "--data", "data.csv")
        assert done.code == 0, done.err
        assert "accuracy  1.0000" in done.out
        told = f"by number: {names[0]} is LABEL_0, {names[1]} is LABEL_1, {names[2]} is LABEL_2"
        assert (told in done.err) == (not names[0].startswith("LABEL"))
    write_csv(
        tmp_path / "data.csv", [row for row, (_, meant) in zip(rows(), texts(), strict=True) if meant != "neutral"]
    )
    done = paceline("evaluate", "model", "--data", "data.csv")
    assert done.code == 2
    assert "label 'entailment' is unknown to the model" in done.err
    assert "write their numbers, 0 to 2" in done.err
    some = [
        row for row, (_, meant) in zip(rows({"contradiction": "2"}), texts(), strict=True) if meant == "contradiction"
    ]
    write_csv(tmp_path / "data.csv", some)
    assert "accuracy  1.0000" in paceline("evaluate", "model", "--data", "data.csv").out


def test_names_are_measured_without_regard_to_case(paceline: Paceline, tmp_path: Path) -> None:
    write_confident(tmp_path / "model", ("ENTAILMENT", "NEUTRAL", "CONTRADICTION"))
    write_csv(tmp_path / "data.csv", rows())
    done = paceline("evaluate", "model", "--data", "data.csv")
    assert "accuracy  1.0000" in done.out, done.err


LISTED = ("toxic", "spam", "rude")
"""In no order that sorting gives."""


def test_a_list_of_label_columns_keeps_its_order_to_the_end(paceline: Paceline, tmp_path: Path) -> None:
    words = {"toxic": "worst", "spam": "cinema", "rude": "jokes"}
    chosen = [[name for bit, name in enumerate(LISTED) if at >> bit & 1] for at in range(8)]
    made = [
        {"text": " ".join(["a", *(words[name] for name in names), f"evening {at}"]),
         **{name: int(name in names) for name in sorted(LISTED)}}
        for at, names in enumerate(chosen * 3)
    ]  # fmt: skip
    write_csv(tmp_path / "data.csv", made)
    (tmp_path / "recipe.yaml").write_text(
        "data: {source: data.csv, label: [toxic, spam, rude], validation: data.csv, test: data.csv}\n"
        f"model: {{config: {json.dumps(tiny_bert_config(initializer_range=0.1))}, vocabulary_size: 200}}\n"
        "loop: {epochs: 50, batch_size: 8, evaluate_every: 150}\n"
        "optimizer: {lr: 0.005}\n"
        "task: {metrics: [exact_match]}\n"
    )
    done = paceline("train", "recipe.yaml", "--out", "run", "--set", "observe.console=plain")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["final"]["test"]["exact_match"] == 1.0
    for file in ("config.json", "paceline.json"):
        saved = json.loads((tmp_path / "run/model" / file).read_text())
        assert tuple(saved.get("label_names") or saved["id2label"].values()) == LISTED
    assert paceline("predict", "run", "data.csv", "-o", "out.csv").code == 0
    found = read_csv(tmp_path / "out.csv")
    assert [name for name in found[0] if name.startswith("probability")] == [f"probability of {n}" for n in LISTED]
    assert [row["prediction"].split("|") for row in found] == [names or [""] for names in chosen * 3]
    for row in found:
        assert all((float(row[f"probability of {name}"]) > 0.5) == (row[name] == "1") for name in LISTED)
