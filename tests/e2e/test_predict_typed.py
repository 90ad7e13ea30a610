"""Labelling without a file: texts that are typed, piped or in memory; and models that no run folder is around."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import paceline as library
from paceline.contract import errors
from tests.e2e.commands import Paceline, read_csv, reviews, write_csv
from tests.e2e.test_inference import train_run
from tests.testing.tiny import tiny_bert_config

TEXTS = ["a lovely film and a plot 1", "a dull plot and a film 2"]
ADDED = ["prediction", "probability of negative", "probability of positive"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 60 reviews whose column has a name of its own; no test changes it."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [{"review": row["text"], "label": row["label"]} for row in reviews(60)]
    return train_run(folder, write_csv(folder / "reviews.csv", rows), text="review")


def plain(trained: Path, folder: Path, **changes: Any) -> Path:
    """The run's model as transformers alone would have saved it."""
    folder.mkdir()
    for path in (trained / "model").iterdir():
        if path.name != "paceline.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_texts_that_are_typed_are_answered_in_lines(trained: Path, paceline: Paceline) -> None:
    done = paceline("predict", trained, "--text", TEXTS[0], "--text", TEXTS[1])
    assert (done.code, done.err) == (0, "")
    found = library.predict(trained, TEXTS)
    for line, row, text in zip(done.out.splitlines(), found, TEXTS, strict=True):
        label, scores, shown = line.split("\t")
        assert (label, shown) == (row["prediction"], text)
        assert scores.startswith(f"{label} {row[f'probability of {label}']:.4f}, "), "the most probable comes first"


def test_lines_of_standard_input_are_texts(
    trained: Path, paceline: Paceline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    piped = paceline("predict", trained, "-")
    assert piped.code == 0, piped.err
    assert piped.out == paceline("predict", trained, "--text", TEXTS[0], "--text", TEXTS[1]).out
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert paceline("predict", trained, "--text", "-").out == piped.out
    monkeypatch.setattr(sys, "stdin", io.StringIO("\r\n".join(TEXTS)))
    assert paceline("predict", trained, "-", "-o", "out.csv").out == "wrote out.csv: 2 rows\n"
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == TEXTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to label"),
        (["new.csv"], "-o out.csv"),
        (["new.csv", "--text", "x"], "new.csv with --text"),
        (["--pair", "x"], "--text is there 0 times and --pair 1 times"),
        (["--text", "a", "--pair", "b"], "trained on single texts"),
        (["--text", "a", "--set", "data.text=review"], "--set data.text=review: has no effect"),
        (["--text", " "], "empty"),
        (["-", "--pair", "b"], "--pair - reads both from each line, a tab between"),
        (["--text", "-", "--text", "a"], "--text - alone"),
        (["--text", "a", "--pair", "-"], "- stands for standard input"),
    ],
)
def test_what_cannot_be_labelled_is_told_in_words(
    trained: Path, paceline: Paceline, arguments: list[str], message: str
) -> None:
    done = paceline("predict", trained, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_pairs_can_be_typed_and_piped(paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"premise": r["text"], "hypothesis": "it was", "label": r["label"]} for r in reviews(40)]
    run = train_run(tmp_path, write_csv(tmp_path / "pairs.csv", rows))
    done = paceline("predict", run, "--text", TEXTS[0], "--pair", "it was")
    assert done.code == 0, done.err
    assert done.out.endswith(f"\t{TEXTS[0]}\tit was\n")
    alone = paceline("predict", run, "--text", TEXTS[0])
    assert alone.code == 2
    assert "trained on pairs" in alone.err
    assert "--text TEXT --pair TEXT" in alone.err
    for source in (["-"], ["--text", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXTS[0]}\tit was\r\n{TEXTS[1]}\tit was\n"))
        piped = paceline("predict", run, *source, "--pair", "-")
        assert piped.code == 0, piped.err
        first, second = piped.out.splitlines(keepends=True)
        assert first == done.out
        assert second.endswith(f"\t{TEXTS[1]}\tit was\n")
    for line, tabs in ((TEXTS[0], 0), ("a\tb\tc", 2)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"a\tb\n{line}\n"))
        piped = paceline("predict", run, "-", "--pair", "-")
        assert (piped.code, piped.out) == (2, "")
        assert f"standard input:2: {tabs} tabs where one stands between two texts" in piped.err


def test_rows_come_back_as_they_were_given(trained: Path, tmp_path: Path) -> None:
    rows = [{"review": text, "n": at} for at, text in enumerate(TEXTS)]
    found = library.predict(trained, rows)
    assert [list(row) for row in found] == [["review", "n", *ADDED]] * 2
    assert [{"review": row["review"], "n": row["n"]} for row in found] == rows
    assert [list(row) for row in rows] == [["review", "n"]] * 2, "the caller's rows are left as they were"
    frame = pd.DataFrame({"review": TEXTS, "when": pd.to_datetime(["2026-01-01", "2026-01-02"])}, index=["a", "b"])
    labelled = library.predict(trained, frame)
    assert list(labelled.columns) == ["review", "when", *ADDED]
    pd.testing.assert_frame_equal(labelled[["review", "when"]], frame)
    assert list(labelled["prediction"]) == [row["prediction"] for row in found]
    assert list(frame.columns) == ["review", "when"]
    source = write_csv(tmp_path / "new.csv", rows)
    assert [row["prediction"] for row in library.predict(trained, source)] == [row["prediction"] for row in found]
    assert library.predict(trained, rows, tmp_path / "out.csv") == 2


def test_a_frame_loses_the_rows_that_are_dropped(trained: Path) -> None:
    frame = pd.DataFrame({"review": [*TEXTS, " "]})
    settings = ["data.on_bad_row=skip", "data.bad_rows_allowed=0.5"]
    found = library.predict(trained, frame, settings=settings)
    assert list(found["review"]) == TEXTS


# ---- models without a run


def test_a_model_of_transformers_is_used_like_a_run(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    model = plain(trained, tmp_path / "plain")
    by_run = paceline("predict", trained, "--text", TEXTS[0])
    for folder in (model, trained / "model"):
        done = paceline("predict", folder, "--text", TEXTS[0])
        assert (done.code, done.out) == (0, by_run.out), done.err
    write_csv(tmp_path / "new.csv", reviews(20))
    done = paceline("evaluate", "plain", "--data", "new.csv")
    assert done.code == 0, done.err
    expected = library.evaluate(trained, data="new.csv", settings=["data.text=text"])
    assert f"{expected.loss:.4f}" in done.out


def test_labelled_rows_are_not_read_from_standard_input(trained: Path, paceline: Paceline) -> None:
    done = paceline("evaluate", trained, "--data", "-")
    assert done.code == 2
    assert "predict alone reads" in done.err
    assert "write the rows into a .csv or .jsonl file" in done.err


def test_a_model_has_no_data_of_its_own(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    plain(trained, tmp_path / "plain")
    done = paceline("evaluate", "plain")
    assert done.code == 2
    assert "plain: has no data of its own" in done.err
    assert "--data FILE" in done.err


def test_a_model_takes_pairs_where_they_are_given(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    plain(trained, tmp_path / "plain")
    done = paceline("predict", "plain", "--text", TEXTS[0], "--pair", TEXTS[1])
    assert done.code == 0, done.err
    assert done.out != paceline("predict", "plain", "--text", TEXTS[0]).out


def test_a_model_without_a_trained_head_is_refused(paceline: Paceline, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**{k: v for k, v in tiny_bert_config().items() if k != "model_type"})).save_pretrained("bare")
    done = paceline("predict", "bare", "--text", "x")
    assert done.code == 2
    assert "bare: is no trained classifier" in done.err
    assert "paceline train --model bare --data FILE" in done.err


def test_what_is_neither_a_run_nor_a_model_is_told_so(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(errors.RunFolderError, match="runs/x: not a run folder"):
        library.predict("runs/x", TEXTS)
    with pytest.raises(errors.RunFolderError, match="owner/name: neither a run folder nor a model"):
        library.predict("owner/name", TEXTS)
    for verb in (("evaluate", "nowhere", "--data", "x.csv"), ("predict", "nowhere", "--text", "x")):
        done = paceline(*verb)
        assert done.code == 2
        assert "nowhere: neither a run folder nor a model" in done.err
        assert "HF_HUB_OFFLINE" in done.err, "it was looked for where train looks"


# ---- train


def test_train_takes_what_makes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[library.Recipe, object]] = []

    class Seen(Exception):
        pass

    def choose(recipe: library.Recipe, *_: object) -> None:
        seen.append((recipe, None))
        raise Seen

    monkeypatch.setattr("paceline.verbs.train.choose", choose)
    plain = {"model": {"source": "m"}, "data": {"source": "a.csv", "test": "t.csv"}}
    (tmp_path / "r.yaml").write_text("model: {source: m}\ndata: {source: a.csv, test: t.csv}\n")
    for recipe in (plain, tmp_path / "r.yaml", str(tmp_path / "r.yaml"), library.Recipe.parse(plain)):
        with pytest.raises(Seen):
            library.train(recipe)
    assert len({recipe.to_yaml() for recipe, _ in seen}) == 1
    with pytest.raises(Seen):
        library.train(plain, data="b.csv")
    assert (seen[-1][0].data.source, seen[-1][0].data.test) == ("b.csv", None), "another source has other test data"
    with pytest.raises(errors.RecipeError, match="a recipe of type list"):
        library.train([1])  # type: ignore[arg-type]
    with pytest.raises(errors.RecipeError, match="no such recipe"):
        library.train("nowhere.yaml")
