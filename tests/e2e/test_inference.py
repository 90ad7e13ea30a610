"""``evaluate`` and ``predict`` on a trained run: the same numbers, every row as it was, whole files or none."""

from __future__ import annotations

import csv
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as library
from paceline.contract.errors import DataError, UserError
from paceline.data import prepare
from paceline.run import inference
from tests.e2e.commands import (
    Paceline,
    read_csv,
    read_json_lines,
    reviews,
    write_csv,
    write_json_lines,
)
from tests.testing.tiny import tiny_bert_config

ADDED = ["prediction", "probability of negative", "probability of positive"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 60 reviews, that no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    return train_run(folder, write_csv(folder / "reviews.csv", reviews(60)))


def train_run(folder: Path, data: Path, **data_settings: Any) -> Path:
    recipe = library.Recipe.parse(
        {
            "model": {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300},
            "data": {"source": str(data), **data_settings},
            "loop": {"epochs": 2, "batch_size": 8},
            "optimizer": {"lr": 1e-3},
            "observe": {"console": "off", "report": False},
        }
    )
    library.train(recipe, out=folder / "run")
    return folder / "run"


def test_a_run_finds_its_own_data_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paceline: Paceline
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    write_csv(home / "reviews.csv", reviews(60))
    write_csv(home / "test.csv", reviews(20))
    write_csv(elsewhere / "reviews.csv", reviews(8))  # another file of that name
    run = train_run(home, Path("reviews.csv"), test="test.csv")
    monkeypatch.chdir(elsewhere)
    encoded: list[int] = []
    encode = prepare.encode_texts
    monkeypatch.setattr(prepare, "encode_texts", lambda *args, **more: encoded.append(1) or encode(*args, **more))
    assert paceline("evaluate", run).code == 0
    assert encoded == [], "data that are in the cache were encoded again"
    resumed = paceline("train", run, "--resume", "--set", "loop.epochs=3")
    assert resumed.code == 0, resumed.err
    assert json.loads((run / "summary.json").read_text())["epochs"] == 3


def test_what_was_cut_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_csv(tmp_path / "reviews.csv", reviews(60))
    recipe = library.Recipe.parse(
        {
            "model": {"config": tiny_bert_config(), "vocabulary_size": 300},
            "data": {"source": str(data), "max_length": 6},
            "loop": {"epochs": 1, "batch_size": 16},
            "observe": {"console": "plain"},
        }
    )
    found = library.train(recipe, out=tmp_path / "run").data
    assert found is not None
    assert found.lengths is not None
    assert found.lengths.cut.texts == 1
    assert dict(found.labels) == {"negative": 24, "positive": 24}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"]["lengths"]["cut"]["texts"] == 1
    cut = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  cut "))
    assert "100.0% of texts" in cut
    assert "at data.max_length = 6" in (tmp_path / "run" / "report.html").read_text()


# ---- evaluate


def test_evaluate_measures_what_the_run_measured(trained: Path, paceline: Paceline) -> None:
    final = json.loads((trained / "summary.json").read_text())["final"]
    for split in ("validation", "test"):
        record = library.evaluate(trained, split=split)
        assert {"loss": record.loss, **record.metrics} == final[split]
        assert record.confusion is not None
        assert sum(map(sum, record.confusion)) == record.samples == 6
    done = paceline("evaluate", trained)
    assert done.code == 0
    assert done.out.splitlines()[0].startswith("test: 6 samples in ")
    assert f"  accuracy  {final['test']['accuracy']:.4f}" in done.out
    assert done.err == ""


@pytest.mark.parametrize("change", ["more rows", "another label", "one label more"])
def test_splits_of_data_that_changed_are_not_the_runs_own(paceline: Paceline, tmp_path: Path, change: str) -> None:
    """Split anew, what the run trained on would be measured, and other labels would have the old ones' places."""
    rows = reviews(60)
    if change == "more rows":
        rows += reviews(66)[60:]
    elif change == "another label":
        rows = [{**row, "label": row["label"].replace("positive", "good")} for row in rows]
    else:
        rows += [{"text": f"so so {i}", "label": "average"} for i in range(20)]
    run = train_run(tmp_path, write_csv(tmp_path / "reviews.csv", reviews(60)))
    write_csv(tmp_path / "reviews.csv", rows)
    done = paceline("evaluate", run)
    assert (done.code, done.out) == (2, "")
    assert "the data have changed since the run" in done.err
    assert "--data FILE" in done.err


def test_evaluate_on_a_file_says_what_it_guessed(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    rows = [{"review": r["text"], "label": r["label"]} for r in reviews(60)]
    write_csv(tmp_path / "labelled.csv", rows)
    done = paceline("evaluate", trained, "--data", "labelled.csv")
    assert done.code == 0, done.err
    assert done.out.startswith("labelled.csv: 60 samples")
    assert "info: text column: 'review' (guessed" in done.err
    one = write_csv(tmp_path / "one.csv", rows[:1])
    assert library.evaluate(trained, data=str(one)).samples == 1, "one row can be measured on"
    assert library.evaluate(trained, rows=rows).loss == library.evaluate(trained, data="labelled.csv").loss


def test_columns_can_be_named_and_other_settings_have_no_effect(
    trained: Path, paceline: Paceline, tmp_path: Path
) -> None:
    rows = [{"one": r["text"], "two": "x y", "truth": r["label"]} for r in reviews(12)]
    write_csv(tmp_path / "new.csv", rows)
    done = paceline("predict", trained, "new.csv", "-o", "out.csv")
    assert done.code == 2
    assert "--set data.text=one" in done.err, "what the message says works"
    text, label = ("--set", "data.text=one"), ("--set", "data.label=truth")
    done = paceline("predict", trained, "new.csv", "-o", "out.csv", *text)
    assert (done.code, done.err) == (0, "")
    assert paceline("evaluate", trained, "--data", "new.csv", *text).code == 2
    done = paceline("evaluate", trained, "--data", "new.csv", *text, *label)
    assert (done.code, done.err) == (0, "")
    done = paceline("evaluate", trained, "--set", "optimizer.lr=1")
    assert (done.code, done.first) == (2, "paceline: --set optimizer.lr=1: has no effect")
    for setting in ("data.splits.seed=1", "data.text=text", "data.max_length=9"):
        done = paceline("evaluate", trained, "--set", setting)
        assert done.code == 2, "another split, or other texts, would be measured on what was trained on"
    assert paceline("evaluate", trained, "--set", "loop.evaluation_batch_size=3", "--set", "device=cpu").code == 0


def test_a_model_of_pairs_asks_for_both_texts(paceline: Paceline, tmp_path: Path) -> None:
    rows = [{"premise": r["text"], "hypothesis": "it was", "label": r["label"]} for r in reviews(40)]
    run = train_run(tmp_path, write_csv(tmp_path / "pairs.csv", rows))
    write_csv(tmp_path / "single.csv", reviews(4))
    for command in (("predict", run, "single.csv", "-o", "out.csv"), ("evaluate", run, "--data", "single.csv")):
        done = paceline(*command)
        assert done.code == 2, done
        assert "trained on pairs" in done.err
    write_csv(tmp_path / "other.csv", [{"question": "why", "answer": "so"}])
    assert paceline("predict", run, "other.csv", "-o", "out.csv").code == 0


def test_a_model_of_single_texts_takes_no_second_one(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_csv(tmp_path / "pairs.csv", [{"sentence1": "a dull film", "sentence2": "it was"}])
    done = paceline("predict", trained, "pairs.csv", "-o", "out.csv")
    assert done.code == 2, "it would silently read both"
    assert "which column is the text?" in done.err
    done = paceline("predict", trained, "pairs.csv", "-o", "out.csv", "--set", "data.text=sentence1")
    assert done.code == 0, done.err


def test_evaluate_names_a_label_the_model_does_not_know(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", [*reviews(5), {"text": "so so", "label": "positve"}])
    done = paceline("evaluate", trained, "--data", "new.csv")
    assert done.code == 2
    assert "paceline: new.csv:7, column 'label': label 'positve' is unknown to the model" in done.err
    assert "did you mean 'positive'?" in done.err


def test_evaluate_names_the_splits_there_are(trained: Path, paceline: Paceline) -> None:
    done = paceline("evaluate", trained, "--split", "dev")
    assert done.code == 2
    assert "--split validation" in done.err


def test_evaluate_refuses_data_of_another_kind(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "many.jsonl", [{"text": r["text"], "label": [r["label"], "x"]} for r in reviews(6)])
    done = paceline("evaluate", trained, "--data", "many.jsonl")
    assert done.code == 2, done
    assert "list" in done.err
    done = paceline("evaluate", trained, "--data", "builtin:digits")
    assert done.code == 2, done
    assert "image data" in done.err
    for command in (("evaluate", trained, "--data"), ("predict", trained, "-o", "out.csv")):
        done = paceline(*command, "builtin:random")
        assert done.code == 2, done
        assert "bare tokens" in done.err


@pytest.mark.parametrize(("verb", "during"), [("evaluate", "an evaluation"), ("predict", "a prediction")])
def test_a_batch_that_does_not_fit_names_its_setting(
    trained: Path, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, during: str
) -> None:
    def full(build: Any) -> Any:
        def infer(batch: Any) -> Any:
            if len(batch.labels) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return plain(build)(batch)

        return infer

    plain = inference.inference
    monkeypatch.setattr(inference, "inference", full)
    rows = write_csv(tmp_path / "rows.csv", reviews(12))
    given = [rows, "--out", tmp_path / "found.csv"] if verb == "predict" else ["--data", rows]
    done = paceline(verb, trained, *given)
    assert done.code == 2
    assert f"out of memory in {during}: loop.evaluation_batch_size = 16" in done.err
    assert "--set loop.evaluation_batch_size=8; then the same command again" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "found.csv").exists()
    assert paceline(verb, trained, *given, "--set", "loop.evaluation_batch_size=8").code == 0


def test_a_folder_without_a_model_is_refused(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    write_csv(tmp_path / "new.csv", reviews(3))
    for way_on in ("remove cut", "paceline train cut --resume"):
        for command in (("evaluate", "cut"), ("predict", "cut", "new.csv", "-o", "out.csv")):
            done = paceline(*command)
            assert done.code == 2, done
            assert way_on in done.err, "a run that was stopped has no model yet"
        (tmp_path / "cut/checkpoints/step-4").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cut/checkpoints/step-4/COMMITTED").touch()
    assert sorted(os.listdir(tmp_path)) == ["cut", "new.csv"]


def test_a_model_from_before_a_run_was_resumed_is_named_as_such(paceline: Paceline, tmp_path: Path) -> None:
    run = train_run(tmp_path, write_csv(tmp_path / "reviews.csv", reviews(60)))
    (run / "summary.json").unlink()  # as a resumed run does, for it has not ended
    write_csv(tmp_path / "new.csv", reviews(3))
    for command in (("evaluate", "run"), ("predict", "run", "new.csv", "-o", "out.csv")):
        done = paceline(*command)
        assert done.code == 0, done
        assert "info: run/model: the run has not ended since it was saved" in done.err, done.err
        assert "paceline train run --resume" in done.err


# ---- predict


def awkward_rows() -> list[dict[str, str]]:
    texts = [row["text"] for row in reviews(20)]
    texts[3] = 'a lovely film,\nwith a "quote", a line break\r\nand a comma'
    texts[4] = "un film superbe — 一部很棒的电影 🎬 \u202eabc"
    texts[5] = "NA"
    texts[6] = "wonderful " * 500
    return [
        {"id": str(900 - at), "text": text, "prediction": "mine", "probability of negative": f"={at}", "": "unnamed"}
        for at, text in enumerate(texts)
    ]


def test_predict_keeps_every_row_as_it_was_and_in_order(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    rows = awkward_rows()
    write_csv(tmp_path / "new.csv", rows)
    done = paceline("predict", trained, "new.csv", "-o", "out.csv")
    assert (done.code, done.out) == (0, "wrote out.csv: 20 rows\n"), done.err
    found = read_csv(tmp_path / "out.csv")
    own = list(rows[0])
    assert list(found[0]) == [*own, "prediction_", "probability of negative_", "probability of positive"]
    assert [{name: row[name] for name in own} for row in found] == rows
    for row in found:
        negative, positive = float(row["probability of negative_"]), float(row["probability of positive"])
        assert negative + positive == pytest.approx(1, abs=2e-6)
        assert row["prediction_"] == ("negative" if negative > positive else "positive")
    assert stat.S_IMODE((tmp_path / "out.csv").stat().st_mode) == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_cells_that_are_formulas_are_made_harmless_on_demand(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1"]
    harmless = ["-1.5", "+3", "-1e-5", "wonderful = lovely", "'=1", ""]
    rows = [{"=text": "a wonderful film", "cell": cell} for cell in [*formulas, *harmless]]
    write_csv(tmp_path / "new.csv", rows)
    command = ("predict", trained, "new.csv", "--set", "data.text==text", "-o")
    assert paceline(*command, "plain.csv").code == 0
    assert [row["cell"] for row in read_csv(tmp_path / "plain.csv")] == [*formulas, *harmless]
    for name in ("safe.csv", "safe.tsv"):
        done = paceline(*command, name, "--safe-csv")
        assert done.code == 0, done.err
        found = read_csv(tmp_path / name, "\t" if name.endswith("tsv") else ",")
        assert [row["cell"] for row in found] == [*("'" + cell for cell in formulas), *harmless]
        assert all(row["'=text"] == "a wonderful film" for row in found)
    refused = paceline(*command, "safe.jsonl", "--safe-csv")
    assert (refused.code, refused.first) == (2, "paceline: --safe-csv: has no effect on .jsonl")


def test_a_carriage_return_in_a_cell_ends_no_row(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", [{"text": "a wonderful film\rand a plot", "id": "1"}, {"text": "dull", "id": "2"}])
    assert paceline("predict", trained, "new.csv", "-o", "out.csv").code == 0
    found = read_csv(tmp_path / "out.csv")
    assert [(row["text"], row["id"]) for row in found] == [("a wonderful film\rand a plot", "1"), ("dull", "2")]


def test_every_output_format_holds_the_same(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    rows = [{"n": at, "text": row["text"], "tags": ["a", at], "flag": True} for at, row in enumerate(reviews(12))]
    write_json_lines(tmp_path / "new.jsonl", rows)
    for suffix in ("csv", "tsv", "jsonl"):
        assert paceline("predict", trained, "new.jsonl", "-o", f"out.{suffix}").code == 0
    as_csv, as_tsv = read_csv(tmp_path / "out.csv"), read_csv(tmp_path / "out.tsv", "\t")
    as_json = read_json_lines(tmp_path / "out.jsonl")
    assert as_csv == as_tsv
    assert [{name: row[name] for name in rows[0]} for row in as_json] == rows, "JSON keeps numbers and lists"
    assert [float(row[ADDED[1]]) for row in as_csv] == [row[ADDED[1]] for row in as_json]
    assert as_csv[3]["tags"] == '["a", 3]', "what is no text is written as JSON"
    assert as_csv[3]["flag"] == "true"


def test_rows_with_columns_of_their_own_lose_none(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a dull film"}, {"text": "fine", "late": 1}, {"text": "x", "prediction": 2}]
    write_json_lines(tmp_path / "new.jsonl", rows)
    assert paceline("predict", trained, "new.jsonl", "-o", "out.csv").code == 0
    found = read_csv(tmp_path / "out.csv")
    assert list(found[0]) == ["text", "late", "prediction", "prediction_", *ADDED[1:]]
    assert [row["late"] for row in found] == ["", "1", ""]
    assert paceline("predict", trained, "new.jsonl", "-o", "out.jsonl").code == 0
    assert [row["prediction_"] for row in read_json_lines(tmp_path / "out.jsonl")] == [r["prediction_"] for r in found]


def test_predictions_do_not_depend_on_the_pieces(
    trained: Path, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"{row['text']} {'film ' * (at * 7 % 23)}"} for at, row in enumerate(reviews(50))]
    write_csv(tmp_path / "new.csv", rows)
    paceline("predict", trained, "new.csv", "-o", "whole.csv")
    monkeypatch.setattr(inference, "WINDOW", 7)
    paceline("predict", trained, "new.csv", "-o", "pieces.csv")
    whole, pieces = read_csv(tmp_path / "whole.csv"), read_csv(tmp_path / "pieces.csv")
    assert [row["text"] for row in pieces] == [row["text"] for row in rows]
    np.testing.assert_allclose([float(r[ADDED[1]]) for r in pieces], [float(r[ADDED[1]]) for r in whole], atol=2e-6)


def test_labels_among_the_input_are_kept_and_not_looked_at(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", [{"text": "a dull film", "label": "never seen"}])
    assert paceline("predict", trained, "new.csv", "-o", "out.csv").code == 0
    assert read_csv(tmp_path / "out.csv")[0]["label"] == "never seen"


def test_a_folder_of_texts_is_predicted_by_file(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("b", "a"):
        (tmp_path / f"texts/{name}.txt").write_text(f"a lovely film {name}")
    assert paceline("predict", trained, "texts", "-o", "out.csv").code == 0
    assert [(row["file"], row["text"]) for row in read_csv(tmp_path / "out.csv")] == [
        ("a.txt", "a lovely film a"),
        ("b.txt", "a lovely film b"),
    ]


def test_half_a_surrogate_pair_is_written_as_json_does(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    """JSON's escapes can spell it, and Python's names of files that are not UTF-8 hold it."""
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / "new.jsonl").write_text(json.dumps({"text": "a lovely film", "note": name}))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text("a lovely film")
    for data, column in (("new.jsonl", "note"), ("texts", "file")):
        assert paceline("predict", trained, data, "-o", "out.jsonl").code == 0
        assert read_json_lines(tmp_path / "out.jsonl")[0][column] == name
        assert paceline("predict", trained, data, "-o", "out.csv").code == 0
        assert read_csv(tmp_path / "out.csv")[0][column] == "caf\\udce9.txt"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_bad_row_stops_before_anything_is_written(
    trained: Path, paceline: Paceline, tmp_path: Path, suffix: str
) -> None:
    write_csv(tmp_path / "new.csv", [*reviews(9), {"text": " ", "label": ""}])
    (tmp_path / f"out.{suffix}").write_text("what was there")
    done = paceline("predict", trained, "new.csv", "-o", f"out.{suffix}")
    assert done.code == 2
    assert "paceline: new.csv:11, column 'text': the text is empty" in done.err
    assert (tmp_path / f"out.{suffix}").read_text() == "what was there"
    assert sorted(os.listdir(tmp_path)) == ["new.csv", f"out.{suffix}"]


def test_rows_that_are_skipped_are_counted(tmp_path: Path, paceline: Paceline) -> None:
    settings = {"on_bad_row": "skip", "bad_rows_allowed": 0.2}
    run = train_run(tmp_path, write_csv(tmp_path / "reviews.csv", reviews(60)), **settings)
    write_csv(tmp_path / "new.csv", [*reviews(9), {"text": " ", "label": ""}])
    done = paceline("predict", run, "new.csv", "-o", "out.csv")
    assert (done.code, done.out) == (0, "wrote out.csv: 9 rows\n")
    assert "info: dropped 1 of 10 rows" in done.err
    write_csv(tmp_path / "worse.csv", [*reviews(3), *[{"text": " ", "label": ""}] * 3])
    assert paceline("predict", run, "worse.csv", "-o", "worse-out.csv").code == 2
    assert not (tmp_path / "worse-out.csv").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.txt", "-o out.txt: unknown kind of file\n  why: written are .csv, .tsv, .jsonl\n  fix: -o out.csv"),
        ("out", "fix: -o out.csv"),
        ("new.csv", "-o new.csv: is the input itself"),
        ("new.csv/out.csv", "new.csv is no folder"),
        ("folder.csv", "-o folder.csv: is a folder"),
    ],
)
def test_a_place_where_nothing_can_be_written(
    trained: Path, paceline: Paceline, tmp_path: Path, out: str, message: str
) -> None:
    write_csv(tmp_path / "new.csv", reviews(3))
    (tmp_path / "folder.csv").mkdir()
    before = (tmp_path / "new.csv").read_bytes()
    done = paceline("predict", trained, "new.csv", "-o", out)
    assert done.code == 2, done
    assert message in done.err
    assert (tmp_path / "new.csv").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["folder.csv", "new.csv"]


def test_a_folder_that_takes_no_files(
    trained: Path, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(tmp_path / "new.csv", reviews(3))
    for out in ("/proc/paceline/out.csv", "/proc/out.csv"):
        done = paceline("predict", trained, "new.csv", "-o", out)
        assert done.code == 2, done
        assert "/proc" in done.err
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
    done = paceline("predict", trained, "new.csv", "-o", "made/out.csv")
    assert done.code == 2, done
    assert "you may not write" in done.err
    assert sorted(os.listdir(tmp_path)) == ["new.csv"]


def test_a_missing_folder_is_made(trained: Path, paceline: Paceline, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", reviews(3))
    assert paceline("predict", trained, "new.csv", "-o", "a/b/out.csv").code == 0
    assert len(read_csv(tmp_path / "a/b/out.csv")) == 3


def test_a_disk_that_fills_up_leaves_the_old_file(
    trained: Path, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    write_csv(tmp_path / "new.csv", reviews(3))
    (tmp_path / "out.csv").write_text("what was there")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = paceline("predict", trained, "new.csv", "-o", "out.csv")
    assert done.code == 2, done
    assert "bytes free" in done.err
    assert "--resume" not in done.err, "that is for runs"
    assert (tmp_path / "out.csv").read_text() == "what was there"
    assert sorted(os.listdir(tmp_path)) == ["new.csv", "out.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("lengths", [[10], [10, 9_000, 9_000]], ids=["told at the end", "told in the middle"])
def test_a_disk_without_room_for_what_is_kept(
    trained: Path, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """A buffer that could not be written is tried again when its file is closed."""
    write_csv(tmp_path / "new.csv", [{"text": "x" * length} for length in lengths])
    full = partial(open, "/dev/full", "r+", encoding="utf-8")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda *_, **__: full())
    done = paceline("predict", trained, "new.csv", "-o", "out.csv")
    assert done.code == 2, done
    assert "no room for writing out.csv" in done.err
    assert os.listdir(tmp_path) == ["new.csv"]


def test_predicting_rows_in_memory(trained: Path, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for row in reviews(5):
            yield {"text": row["text"], "score": float("nan")}

    assert library.predict(trained, None, tmp_path / "out.jsonl", rows=rows()) == 5
    found = read_json_lines(tmp_path / "out.jsonl")
    assert found[0]["score"] is None, "JSON has no NaN"
    assert "NaN" not in (tmp_path / "out.jsonl").read_text()
    with pytest.raises(UserError, match="data or rows"):
        library.predict(trained, None, tmp_path / "out.csv")
    with pytest.raises(DataError, match="rows"):
        library.predict(trained, None, tmp_path / "out.csv", rows=[])
    assert not (tmp_path / "out.csv").exists()


def test_a_run_on_rows_in_memory_is_measured_on_rows_that_are_given(tmp_path: Path, paceline: Paceline) -> None:
    recipe = library.Recipe.parse(
        {
            "model": {"config": tiny_bert_config(), "vocabulary_size": 300},
            "loop": {"epochs": 1},
            "observe": {"console": "off", "report": False},
        }
    )
    run = Path(library.train(recipe, reviews(40), out=tmp_path / "run").folder)
    done = paceline("evaluate", run)
    assert done.code == 2
    assert "--data FILE" in done.err
    assert library.evaluate(run, rows=reviews(10)).samples == 10
    write_csv(tmp_path / "new.csv", reviews(4))
    assert paceline("predict", run, "new.csv", "-o", "out.csv").code == 0


BOUNDED = """
import resource, sys
from pathlib import Path
import paceline
run, data, out = sys.argv[1:]
paceline.predict(run, str(Path(data).with_name("few.csv")), out)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
paceline.predict(run, data, out)
print(peak() - before)
"""


@pytest.mark.slow
def test_many_rows_need_no_more_memory_than_a_few(trained: Path, tmp_path: Path) -> None:
    """100 MB of rows: held as a whole they would take more than that."""
    rows, filler = 20_000, "x" * 5_000
    with (tmp_path / "many.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "filler"])
        writer.writerows([f"a dull film {number}", filler] for number in range(rows))
    with (tmp_path / "few.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "filler"], *[["a dull film", filler]] * 8192])
    command = [sys.executable, "-c", BOUNDED, trained, tmp_path / "many.csv", tmp_path / "out.csv"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 30, f"{done.stdout} MiB more for more rows"
    with (tmp_path / "out.csv").open(newline="") as file:
        assert sum(1 for _ in csv.reader(file)) == rows + 1
