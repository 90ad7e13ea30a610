"""What a newcomer gets wrong: exit code 2, no traceback, the place, the cause and the way out, and nothing lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.memory.predict import Predictor
from paceline.verbs.launch import check
from tests.e2e.commands import (
    Done,
    Paceline,
    read_csv,
    read_json_lines,
    reviews,
    write_csv,
    write_json_lines,
)
from tests.testing.tiny import write_tiny_model

SHORT = ("--set", "loop.max_steps=1", "--set", "observe.console=plain", "--set", "observe.report=false")

Content = str | bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture
def train(paceline: Paceline, model: Path) -> Callable[..., Done]:
    """Trains on a file of the current folder."""

    def run(data: object, *arguments: object) -> Done:
        return paceline("train", "--model", model, "--data", data, *SHORT, *arguments)

    return run


def lines(rows: int = 24) -> str:
    return "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in reviews(rows))


def json_lines(rows: int = 24) -> str:
    return "".join(json.dumps(row) + "\n" for row in reviews(rows))


def teaches(done: Done, *parts: str) -> None:
    """The message has these parts, and is one that a person can act upon."""
    assert done.code == 2, done
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err, done.err
    assert "  fix: " in done.err, f"it names no way out: {done.err}"
    assert max(map(len, done.err.splitlines())) < 400, done.err
    assert done.err.isprintable() or done.err.replace("\n", "").isprintable(), "control characters reach the terminal"


# ---- rows


ROWS: dict[str, tuple[str, Content, tuple[str, ...]]] = {
    "empty file": ("a.csv", "", ("a.csv: the file is empty", "text,label")),
    "empty lines": ("a.jsonl", "", ("a.jsonl: the file is empty", '{"text"')),
    "header only": ("a.csv", "text,label\n", ("a.csv:1: only a header", "add rows")),
    "one row": ("a.csv", "text,label\nfine,good\n", ("a.csv:2: 1 row of data", "at least 2")),
    "short row": ("a.csv", lines() + "lonely\n", ("a.csv:26, column 'label'", "too short", "'lonely'", "1 cell;")),
    "long row": ("a.csv", lines() + "a, b,good\n", ("a.csv:26, column 'label'", "too long", "'a, b,good'", "quotes")),
    "unclosed quote": ("a.csv", lines() + '"a,good\nb,bad\n', ("a.csv:26", "not closed", "'\"a,good'", "line 27")),
    "quote in a cell": ("a.csv", lines() + '"a "b" c",good\n', ("a.csv:26", "quotes do not match", 'twice: ""')),
    "NUL": ("a.csv", lines() + "a\0b,good\n", ("a.csv:26, column 'text': a NUL", r"'a\x00b,good", "tr -d")),
    "NUL in JSON": ("a.jsonl", json_lines() + '{"text": "a\\u0000b", "label": "good"}\n', ("a.jsonl:25", "a NUL")),
    "cut JSON line": (
        "a.jsonl",
        json_lines()[:-15],
        ("a.jsonl:24: the line is not JSON", "cut off", "copy or download"),
    ),
    "no JSON object": ("a.jsonl", json_lines() + "[1]\n", ("a.jsonl:25", "no JSON object", "found a list")),
    "JSON array": ("a.jsonl", json.dumps(reviews(4)), ("a.jsonl:1", "one JSON array", "jq -c")),
    "key twice": ("a.jsonl", json_lines() + '{"text": "a", "text": "b"}', ("a.jsonl:25, column 'text'", "given twice")),
    "cut gzip": ("a.jsonl.gz", gzip.compress(json_lines().encode())[:-12], ("a.jsonl.gz:2", "cut off", "gzip -t")),
    "no gzip": ("a.csv.gz", lines(), ("a.csv.gz:1: not a whole gzip file",)),
    "mixed labels": (
        "a.jsonl",
        json_lines() + '{"text": "a", "label": 3}\n',
        ("a.jsonl:25, column 'label': mixed label types (found '3')", "most labels here are text"),
    ),
    "empty text": ("a.csv", lines() + " ,good\n", ("a.csv:26, column 'text': the text is empty", "on_bad_row=skip")),
    "empty label": ("a.csv", lines() + "fine,\n", ("a.csv:26, column 'label': the label is empty", "on_bad_row=skip")),
    "no label in a row": ("a.jsonl", json_lines() + '{"text": "fine"}\n', ("a.jsonl:25, column 'label'", "no 'label'")),
    "null text": ("a.jsonl", json_lines() + '{"text": null, "label": "x"}\n', ("a.jsonl:25", "the text is missing")),
    "number for a text": ("a.jsonl", json_lines() + '{"text": 7, "label": "x"}\n', ("a.jsonl:25", "found int")),
    "one class": ("a.csv", "text,label\na,good\nb,good\n", ("a.csv:2, column 'label'", "one class", "allow_single")),
    "header twice": ("a.csv", "text,label,text\na,b,c\n", ("a.csv:1, column 'text'", "twice", "'text,label,text'")),
    "another separator": ("a.csv", lines().replace(",", "~"), ("a.csv", "'text~label'")),
    "no header": (
        "a.csv",
        lines().partition("\n")[2],
        ("a.csv:1: the first row seems to be data", "add a line before it that names the columns"),
    ),
    "a 20 MB cell": (
        "a.csv",
        lines() + "x" * 20_000_000 + ",good\n",
        ("a.csv:26, column 'text': a cell of over 10 MB", "(20,000,000 characters)"),
    ),
    "a 20 MB label": (
        "a.csv",
        lines() + "x," + "good" * 5_000_000 + "\n",
        ("a.csv:26, column 'label': a label of over", "data.label="),
    ),
    "NaN target": (
        "a.csv",
        "text,score\n" + "".join(f"t {n},{n / 7 if n != 5 else 'nan'}\n" for n in range(24)),
        ("a.csv:7, column 'score': the label is not a finite number", "NaN"),
    ),
    "word for a target": (
        "a.csv",
        "text,score\n" + "".join(f"t {n},{n / 7 if n != 5 else 'high'}\n" for n in range(24)),
        ("a.csv:7, column 'score': mixed label types (found 'high')", "task.type=classification"),
    ),
    "target too large": (
        "a.csv",
        "text,score\n" + "".join(f"t {n},{n / 7 if n != 5 else 1e300}\n" for n in range(24)),
        ("a.csv:7, column 'score'", "1e+300", "scale"),
    ),
    "columns swapped": (
        "a.csv",
        "label,text\n" + "".join(f"{row['text']},{row['label']}\n" for row in reviews(24)),
        ("a.csv, column 'label': 24 different labels in 24 rows (found 'a dull film", "data.label=COLUMN"),
    ),
    "one label for several": (
        "a.csv",
        lines(),
        ("a.csv, column 'label': task.type = 'multi_label' needs several labels a row", "label_separator"),
    ),
    "unknown split": (
        "a.csv",
        "text,label,split\n" + "".join(f"t {n},{n % 2},{'train' if n != 5 else 'tran'}\n" for n in range(24)),
        ("a.csv:7, column 'split': unknown split (found 'tran')", "did you mean 'train'?"),
    ),
    "class missing from train": (
        "a.csv",
        "text,label,split\na,x,train\nb,y,train\nc,x,test\nd,z,test\n",
        ("a.csv:5, column 'label': a class that is missing from train (found 'z')", "x, y"),
    ),
    "no train": (
        "a.csv",
        "text,label,split\na,x,dev\nb,y,test\n",
        ("a.csv, column 'split': no row belongs to train", "test and validation"),
    ),
    "escape sequences": ("a.csv", lines() + "\x1b[2J\u202e,good,\x1b]0;x\x07\n", ("a.csv:26", r"\x1b[2J\u202e")),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_rows_are_named_by_their_place(train: Callable[..., Done], tmp_path: Path, name: str) -> None:
    file, content, parts = ROWS[name]
    (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    started = time.perf_counter()
    asked = ("--set", "task.type=multi_label") if name == "one label for several" else ()
    teaches(train(file, *asked), *parts)
    assert time.perf_counter() - started < 20
    assert sorted(os.listdir(tmp_path)) == [file], "a run that never was leaves nothing behind"


def test_an_out_folder_can_be_used_again(train: Callable[..., Done], tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text(lines() + "too,many,cells\n")
    teaches(train("a.csv", "--out", "made/run"), "a.csv:26")
    assert not (tmp_path / "made").exists()
    (tmp_path / "mine").mkdir()
    teaches(train("a.csv", "--out", "mine"), "a.csv:26")
    assert (tmp_path / "mine").is_dir(), "a folder that was there before stays"
    data.write_text(lines())
    for out in ("made/run", "mine"):
        done = train("a.csv", "--out", out)
        assert done.code == 0, done.err
    teaches(train("a.csv", "--out", "mine"), "already holds a run", "--resume")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["optimizer.groups=[{match: nothing*}]"], "optimizer.groups.0.match = 'nothing*'"),
        (["loop.batch_size=64", "loop.drop_last=true"], "loop.batch_size = 64"),
        (["loop.best_metric=acuracy"], "did you mean 'accuracy'?"),
        (["loop.best_metric=auroc"], "loop.best_metric = auroc: not measured"),
        (["loop.best_metric=loss"], "--set loop.best_metric=-loss"),
        (["task.metrics=[acuracy]"], "did you mean 'accuracy'?"),
        (["task.metrics=[mse]"], "task.metrics = mse: unknown for this task"),
        (["task.loss=nowhere:loss"], "there is no module nowhere"),
        (["schedule.type=nowhere:rate"], "there is no module nowhere"),
        (["schedule.warmup=9"], "schedule.warmup = 9"),
        (["model.train=last:9"], "model.train=last:2"),
        (["data.max_length=500"], "--set data.max_length=64"),
        (["data.splits.test=100"], "data.splits asks for 102 rows"),
        (["model.config.hiden_size=3"], "did you mean 'hidden_size'?"),
        (["data.text=txt"], "did you mean 'text'?"),
        (["data.label=[label,lable]"], "did you mean 'label'?"),
        (["task.type=regression"], "mixed label types"),
        (["data.source=builtin:digits"], "image data"),
        (["data.source=builtin:digit"], "did you mean 'builtin:digits'?"),
        (["data.test=tests.csv"], "data.test = 'tests.csv': no such file"),
        (["data.image_size=32"], "data.image_size = 32: no effect on texts"),
        (["data.source=builtin:random", "data.random.vocabulary=999"], "--set data.random.vocabulary="),
        (["task.loss=json:loads"], "task.loss = json:loads: takes other arguments"),
        (["task.metrics=['json:loads']"], "def loads(scores, labels): ..."),
        (["schedule.type=json:loads"], "def loads(step, total_steps): ..."),
        (["schedule.type=os.path:commonpath"], "takes other arguments"),
        (["schedule.type=operator:concat"], "schedule.type = operator:concat: failed"),
        (["loop.early_stopping={patience: 1}", "data.splits.validation=0"], "there is no validation split"),
    ],
)
def test_a_setting_that_the_data_or_the_model_refuse(
    train: Callable[..., Done], tmp_path: Path, settings: list[str], part: str
) -> None:
    (tmp_path / "a.csv").write_text(lines())
    sources = [setting.removeprefix("data.source=") for setting in settings if setting.startswith("data.source=")]
    others = [word for setting in settings if "data.source=" not in setting for word in ("--set", setting)]
    done = train(*(sources or ["a.csv"]), "--out", "run", *others)
    assert done.code == 2, done
    assert part in done.err
    assert sorted(os.listdir(tmp_path)) == ["a.csv"], "nothing is in the way of the next try"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("review.csv", ("no such file", "did you mean 'reviews.csv'?")),
        ("nowhere/a.csv", ("no such file", "no folder 'nowhere'")),
        ("table.xls", ("table.xls: not a whole .xls file", "save it again")),
        ("table.xlsx", ("table.xlsx: not a whole .xlsx file", "save it again")),
        ("data.json", ("data.json:1: the file is not JSON", "correct it there")),
        ("texts.txt", ("no reader for .txt", "a folder per class")),
        ("empty", ("no texts, images or tables found", "FOLDER/CLASS")),
        ("s3://bucket/data.csv", ("no such file",)),
        ("hub:", ("no name after hub:",)),
        ("builtin:imdb", ("no such built-in",)),
    ],
)
def test_a_source_that_cannot_be_read(
    train: Callable[..., Done], tmp_path: Path, name: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "reviews.csv").write_text(lines())
    for file in ("table.xls", "table.xlsx", "data.json", "texts.txt"):
        (tmp_path / file).write_text("?")
    (tmp_path / "empty").mkdir()
    before = sorted(os.listdir(tmp_path))
    teaches(train(name), *parts)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("verb", "setting", "arguments"),
    [
        ("train", "source", SHORT),
        ("train", "validation", SHORT),
        # imports torch twice, in processes of its own
        pytest.param("plan", "test", ("--gpu", "24GiB", "--read-data"), marks=pytest.mark.slow),
    ],
)
def test_a_file_that_is_missing_is_told_before_the_model_is_looked_for(
    paceline: Paceline, tmp_path: Path, verb: str, setting: str, arguments: tuple[str, ...]
) -> None:
    """A model may take a download to be found missing."""
    (tmp_path / "a.csv").write_text(lines())
    data = () if setting == "source" else ("--data", "a.csv")
    both = ("--model", "nowhere/model", *data, "--set", f"data.{setting}=b.csv")
    done = paceline(verb, *both, *arguments)
    teaches(done, f"data.{setting} = 'b.csv': no such file", "the folder '.' holds a.csv")
    assert "nowhere/model" not in done.err


def test_a_later_file_with_other_columns(train: Callable[..., Done], tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", reviews(24))
    write_csv(tmp_path / "b.csv", [{"review": r["text"], "label": r["label"]} for r in reviews(6)])
    teaches(train("a.csv", "--set", "data.test=b.csv"), "b.csv: no column 'text'", "'review', 'label'")


def test_a_label_of_a_later_file_that_train_lacks(train: Callable[..., Done], tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", reviews(24))
    write_csv(tmp_path / "b.csv", [*reviews(6), {"text": "so so", "label": "neutral"}])
    done = train("a.csv", "--set", "data.test=b.csv")
    teaches(done, "b.csv:8, column 'label': a class that is missing from train (found 'neutral')")


def test_an_image_that_is_none(paceline: Paceline, tmp_path: Path) -> None:
    from tests.e2e.test_kinds import write_images

    write_images(tmp_path / "pictures", 20, ("cat", "dog"), 8)
    (tmp_path / "pictures/cat/000.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (tmp_path / "r.yaml").write_text("model: {config: {model_type: resnet}}\ndata: {source: pictures}\n")
    teaches(paceline("train", "r.yaml"), "cat/000.png", "not a whole image")
    shutil.rmtree(tmp_path / "pictures/cat")
    write_images(tmp_path / "pictures", 20, ("cat",), 9)
    teaches(paceline("train", "r.yaml"), "different sizes", "data.image_size=8")


# ---- what is no mistake


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_words_that_look_like_nothing_stay_words(
    train: Callable[..., Done], paceline: Paceline, tmp_path: Path, suffix: str
) -> None:
    words = ("NA", "null", "None", "nan", "N/A", "#N/A", "NULL", "n/a")
    rows = [
        {"text": f"{words[n % 8]}{' ' * (n > 7)}{n if n > 7 else ''}", "label": ("NA", "null")[n % 2]}
        for n in range(40)
    ]
    (write_csv if suffix == "csv" else write_json_lines)(tmp_path / f"a.{suffix}", rows)
    done = train(f"a.{suffix}", "--out", "run")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run/model/config.json").read_text())["label2id"] == {"NA": 0, "null": 1}
    assert paceline("predict", "run", f"a.{suffix}", "-o", "out.csv").code == 0
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == [row["text"] for row in rows]


def test_bad_rows_are_skipped_when_asked_for(train: Callable[..., Done], tmp_path: Path) -> None:
    good = lines(40).splitlines(keepends=True)
    (tmp_path / "a.csv").write_text("".join([*good[:10], "lonely\n", *good[10:], " ,positive\n"]))
    teaches(train("a.csv", "--on-bad-row", "skip", "--out", "run"), "2 of 42 rows (4.8%)", "bad_rows_allowed=0.05")
    quarantined = read_json_lines(tmp_path / "run/quarantine.jsonl")
    assert [(row["line"], row["row"]) for row in quarantined] == [(11, "lonely\n"), (43, "text=' ', label='positive'")]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "quarantine.jsonl"], "what the message names, no more"
    allowed = ("--set", "data.bad_rows_allowed=0.05")
    done = train("a.csv", "--on-bad-row", "skip", "--out", "run", *allowed)
    assert done.code == 0, done.err
    assert "dropped 2 of 42 rows (4.76%): 1 × the row is too short, 1 × the text is empty" in done.out
    assert len(read_json_lines(tmp_path / "run/quarantine.jsonl")) == 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert any("dropped 2 of 42" in notice for notice in summary["notices"])
    again = train("a.csv", "--on-bad-row", "skip", "--out", "again", *allowed)
    assert "dropped 2 of 42 rows" in again.out, "also when the encoded data come from the cache"


# ---- recipes


RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown part": ("lop: {epochs: 2}", ("lop = ", "unknown key", "did you mean 'loop'?")),
    "unknown key": ("optimizer: {lrr: 3}", ("optimizer.lrr = 3: unknown key", "fix: --set optimizer.lr=3")),
    "unknown key in a list": (
        "optimizer: {groups: [{mach: x}]}",
        ("groups.0.mach", "did you mean 'match'?", "fix: optimizer.groups.0.match"),
    ),
    "word for a number": ("optimizer: {lr: fast}", ("optimizer.lr = 'fast'", "number")),
    "rate beyond fp32": ("optimizer: {lr: 1e38}", ("optimizer.lr: 1e+38 is more than any", "1e+30")),
    "negative rate": ("optimizer: {lr: -1}", ("optimizer.lr = '-1'", "greater than 0")),
    "unknown choice": ("optimizer: {type: adamx}", ("optimizer.type = 'adamx'", "'adamw'")),
    "unknown device": ("device: tpu", ("device = 'tpu'", "'cpu'")),
    "word for a list": ("task: {metrics: accuracy}", ("task.metrics = 'accuracy'", "task.metrics=[accuracy]")),
    "word for a part": ("loop: 3", ("loop = '3'", "a group of settings: epochs,")),
    "no reference": ("task: {loss: mine}", ("task.loss = 'mine'", "module:function")),
    "no way to train": ("model: {source: x, train: lats:1}", ("model.train = 'lats:1'", "last:K")),
    "shares above one": ("data: {splits: {test: 0.6, validation: 0.6}}", ("data.splits", "1.2")),
    "no effect": ("optimizer: {momentum: 0.5}", ("momentum", "no effect with type: adamw")),
    "early stopping never": (
        "loop: {early_stopping: {patience: 2}, evaluate_every: never}",
        ("early_stopping has no effect",),
    ),
    "classifier of no use": ("model: {source: x, classifier: svm}", ("no effect without train: features",)),
    "number for a name": ("model: {source: 3}", ("model.source = '3'", 'model.source="3"')),
    "a name that leads elsewhere": ("name: ../x", ("name = '../x'", "letters, digits")),
    "fp16 on a CPU": ("techniques: {precision: fp16}\ndevice: cpu", ("precision = fp16", "precision=fp32")),
    "what excludes another": (
        "techniques: {recompute: true}\nmodel: {source: x, train: head}",
        ("techniques.recompute = true", "model.train", "techniques.recompute=false"),
    ),
    "a bracket left open": ("loop: {epochs: 3", ("r.yaml:", "not YAML")),
    "a tab": ("loop:\n\tepochs: 3", ("r.yaml:4:1: not YAML", "indent with blanks")),
    "a key twice": ("seed: 1\nseed: 2", ("r.yaml:4:1", "'seed' given twice")),
    "a list for a key": ("? [a]\n: b", ("r.yaml:", "is no key")),
    "a number for a key": ("3: b", ("3",)),
    "a tag": (
        "seed: !!python/object/apply:os.system ['touch run-by-yaml']",
        ("r.yaml:3:7: the tag !!python/object/apply:os.system is not read", "nothing in it is run"),
    ),
    "a local tag": ("seed: !include secret.yaml", ("r.yaml:3:7: the tag !include is not read",)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bad_recipes_teach(paceline: Paceline, tmp_path: Path, model: Path, name: str) -> None:
    text, parts = RECIPES[name]
    (tmp_path / "a.csv").write_text(lines())
    head = f"model: {{source: {model}}}\n" if "model:" not in text else "# the model is below\n"
    head += "data: {source: a.csv}\n" if "data:" not in text else "# and the data\n"
    (tmp_path / "r.yaml").write_text(head + text + "\n")
    done = paceline("train", "r.yaml", "--out", "run")
    assert done.code == 2, done
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err, done.err
    assert "  why: " in done.err or "  fix: " in done.err or ":" in done.first
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "r.yaml"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ("r.yaml: the recipe is empty", "model: {source: NAME}")),
        ("- a\n", ("r.yaml: a recipe is a mapping", "['a']")),
        ("data: {source: a.csv}\n", ("model: missing", "model.source")),
        ("model: bert\n", ("model = 'bert'", "--set model.source=bert")),
        ("model: {}\n", ("model: no model", "model.source")),
        ("model: {source: x, config: {}, factory: 'a:b'}\n", ("factory builds the whole model",)),
        ("model: {config: {hidden_size: 3}}\n", ("needs model_type",)),
        ("model: {config: {model_type: brt}}\ndata: {source: a.csv}\n", ("model_type = brt: unknown", "did you mean")),
        ("model: {source: x}\n", ("data.source: missing", "--data FILE")),
        ("model: &m\n  config: {model_type: bert, inner: *m}\n", ()),
    ],
)
def test_recipes_that_are_none(paceline: Paceline, tmp_path: Path, content: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "r.yaml").write_text(content)
    (tmp_path / "a.csv").write_text(lines())
    done = paceline("train", "r.yaml")
    assert done.code == 2, done
    for part in parts:
        assert part in done.err, done.err
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "r.yaml"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.yaml"], ("none.yaml: no such recipe",)),
        (["a.csv"], ("--model: missing", "--model distilbert-base-uncased --data a.csv")),
        (["a.csv", "--data", "b.csv"], ("a.csv with --data b.csv: two sources", "leave one")),
        (["."], ("is a folder", "--data .")),
        ([], ("--model and --data: missing", "--model distilbert-base-uncased")),
        (["--data", "a.csv"], ("--model: missing",)),
        (["r.yaml", "--set", "loop.epochs"], ("--set 'loop.epochs'", "key=value")),
        (["r.yaml", "--set", "=3"], ("--set '=3'", "key=value")),
        (["r.yaml", "--set", "loop.epoch=3"], ("loop.epoch = 3: unknown key", "loop.epochs")),
        (["r.yaml", "--set", "loop.epochs=few"], ("loop.epochs = 'few'", "integer")),
        (["r.yaml", "--gpus", "2", "--processes", "2"], ("--gpus 2 with --processes 2",)),
        (["run", "--resume", "--model", "m"], ("--resume with --model",)),
        (["--resume"], ("no run folder given",)),
        (["run", "--resume"], ("run: not a run folder", "no such folder")),
        ([".", "--resume"], ("no recipe.yaml",)),
        (["r.yaml", "--out", "a.csv"], ("a.csv: not a folder", "--out")),
        (["r.yaml", "--out", "full"], ("full: not empty", "'mine.txt'")),
        (["r.yaml", "--out", "a.csv/run"], ("not a folder", "--out")),
    ],
)
def test_commands_that_cannot_be_meant(
    paceline: Paceline, tmp_path: Path, model: Path, arguments: list[str], parts: tuple[str, ...]
) -> None:
    (tmp_path / "a.csv").write_text(lines())
    (tmp_path / "r.yaml").write_text(f"model: {{source: {model}}}\ndata: {{source: a.csv}}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    teaches(paceline("train", *arguments), *parts)
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "full", "r.yaml"]
    assert os.listdir(tmp_path / "full") == ["mine.txt"]


def test_an_out_folder_where_nothing_can_be_written(train: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(lines())
    teaches(train("a.csv", "--out", "/proc/paceline/run"), "/proc/paceline/run", "--out")


def test_words_that_yaml_once_took_for_booleans(paceline: Paceline, tmp_path: Path, model: Path) -> None:
    rows = [{"on": row["text"], "no": ("yes", "off")[at % 2]} for at, row in enumerate(reviews())]
    write_csv(tmp_path / "a.csv", rows)
    (tmp_path / "r.yaml").write_text(f"model: {{source: {model}}}\ndata: {{source: a.csv, text: on, label: no}}\n")
    done = paceline("train", "r.yaml", "--out", "run", *SHORT, "--set", "observe.console=off")
    assert (done.code, done.out) == (0, ""), done
    assert json.loads((tmp_path / "run/model/config.json").read_text())["label2id"] == {"off": 0, "yes": 1}
    assert paceline("train", "run/recipe.yaml", "--out", "again").code == 0, "what we write, we read as we wrote it"
    assert json.loads((tmp_path / "again/model/config.json").read_text())["label2id"] == {"off": 0, "yes": 1}


# ---- models


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("./nowhere", ("model.source = ./nowhere: no such folder",)),
        ("/nowhere/at/all", ("model.source = /nowhere/at/all: no such folder", "/nowhere/at is no folder")),
        ("a.csv", ("a.csv: is a file", "a model is a folder")),
        ("empty", ("empty: has no config.json", "the Hub")),
        ("two words/x", ("neither a folder nor a Hub name",)),
        ("distilbert-base-uncased", ("not in the cache", "HF_HUB_OFFLINE", "hf download distilbert-base-uncased")),
    ],
)
def test_a_model_that_is_not_there(paceline: Paceline, tmp_path: Path, name: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "a.csv").write_text(lines())
    (tmp_path / "empty").mkdir()
    started = time.perf_counter()
    teaches(paceline("train", "--model", name, "--data", "a.csv"), *parts)
    assert time.perf_counter() - started < 10, "offline is known at once"
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "empty"]


def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    paceline: Paceline, tmp_path: Path, model: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    (tmp_path / "a.csv").write_text(lines())
    shutil.copytree(model, tmp_path / "old")
    torch.save(load_file(tmp_path / "old/model.safetensors"), tmp_path / "old/pytorch_model.bin")
    (tmp_path / "old/model.safetensors").unlink()
    done = paceline("train", "--model", "old", "--data", "a.csv", *SHORT)
    teaches(done, "pytorch_model.bin", "pickle", "fix: paceline convert old")
    assert paceline("convert", "old").code == 0
    assert paceline("train", "--model", "old", "--data", "a.csv", "--out", "run", *SHORT).code == 0


@pytest.mark.parametrize("damage", ["cut", "lfs", "config"])
def test_a_damaged_model(paceline: Paceline, tmp_path: Path, model: Path, damage: str) -> None:
    (tmp_path / "a.csv").write_text(lines())
    shutil.copytree(model, tmp_path / "old")
    weights = tmp_path / "old/model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        (tmp_path / "old/config.json").write_text("{")
    done = paceline("train", "--model", "old", "--data", "a.csv", *SHORT)
    teaches(done, "old", {"cut": "damaged", "lfs": "git lfs pull", "config": "not JSON"}[damage])


# ---- as a shell sees it


@pytest.mark.slow
def test_a_process_exits_with_2_and_says_it_on_standard_error(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.csv").write_text(lines() + "lonely\n")
    command = [Path(sys.executable).with_name("paceline"), "train", "--model", model, "--data", "a.csv"]
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: a.csv:26, column 'label': the row is too short (found 'lonely')\n  why: ")
    (tmp_path / "a.csv").write_text(lines())
    done = subprocess.run([*command, "--out", "run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "finished" in done.stdout


# ---- ranks that share one model


SHARED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stages": (("--processes", "4", "--set", "parallel.pipeline=4"), ("2 blocks", "parallel.pipeline=2")),
    "heads": (("--processes", "4", "--set", "parallel.tensor=4"), ("2 attention heads", "parallel.tensor=2")),
    "no whole groups": (("--processes", "3", "--set", "parallel.tensor=2"), ("groups of 2", "parallel.tensor=3")),
}


@pytest.fixture
def asked_beside(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that is there already reads the model, not one of the command's own."""
    monkeypatch.setattr(check, "Predictor", lambda: contextlib.nullcontext(predictor))


@pytest.mark.usefixtures("asked_beside")
@pytest.mark.parametrize(("asked", "parts"), SHARED.values(), ids=SHARED)
def test_a_model_that_ranks_cannot_share_is_refused_before_any_is_started(
    asked: tuple[str, ...], parts: tuple[str, ...], train: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(Path("a.csv"), reviews(24))
    monkeypatch.setattr("paceline.verbs.launch.launch", lambda *_, **__: pytest.fail("ranks are started"))
    done = train("a.csv", *asked)
    teaches(done, *parts, "  fix: paceline train --model")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("asked_beside")
@pytest.mark.parametrize(("asked", "parts"), SHARED.values(), ids=SHARED)
def test_and_before_a_job_is_queued(
    asked: tuple[str, ...], parts: tuple[str, ...], paceline: Paceline, model: Path
) -> None:
    write_csv(Path("a.csv"), reviews(24))
    done = paceline("launch", "slurm", "--model", model, "--data", "a.csv", "--dry-run", *asked)
    teaches(done, *parts)
    assert not done.out
