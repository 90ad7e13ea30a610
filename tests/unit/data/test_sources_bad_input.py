"""Every kind of bad input ends in an error that says where, why and what to do; nothing is dropped in silence."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read
from paceline.data.sources.lines import Lines
from paceline.recipe.parts import DataPart
from paceline.verbs.data import KNOWN

BIG = "x" * 20_000_000


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CASES = {
    # name: (file name, content, place, words of the whole message, words of the fix)
    "empty csv": ("a.csv", b"", "a.csv", ["empty"], "text,label"),
    "empty jsonl": ("a.jsonl", b"", "a.jsonl", ["empty"], "one object a line"),
    "blank jsonl": ("a.jsonl", b"\n\n", "a.jsonl", ["empty"], "one object a line"),
    "only a byte order mark": ("a.csv", b"\xef\xbb\xbf", "a.csv", ["empty"], "text,label"),
    "header only": ("a.csv", b"text,label\n", "a.csv:1", ["only a header", "text, label"], "add rows"),
    "short row": (
        "a.csv",
        b"text,label\na,x\nb\n",
        "a.csv:3, column 'label'",
        ["too short", "'b'", "1 cell;"],
        "quotes",
    ),
    "long row": ("a.csv", b"text,label\na,x\nb,c,y\n", "a.csv:3, column 'label'", ["too long", "b,c,y"], "quotes"),
    "unclosed quote": ("a.csv", b'text,label\na,x\n"b,y\nc,x\n', "a.csv:3", ["not closed", "line 4"], "close it"),
    "stray quote": ("a.csv", b'text,label\n"a" b,x\nc,y\n', "a.csv:2", ["quotes do not match"], "twice"),
    "quote closed rows later": ("a.csv", b'text,label\n"a,x\nb,"y"\nc,x\n', "a.csv:2", ["lines 2 to 3"], "twice"),
    "carriage returns": ("a.csv", b"text,label\ra,x\rb,y\r", "a.csv:1", ["carriage return"], "tr "),
    "damaged utf-8": (
        *("a.csv", "text,label\n好的,x\n".encode() + b"caf\xe9,y\n"),
        *("a.csv:3", ["UTF-8", "byte offset 23", "the rest of the file"], "write the row anew"),
    ),
    "nul byte": ("a.csv", b"text,label\na,x\nb\0c,y\n", "a.csv:3", ["NUL", "byte offset 16"], "tr -d"),
    "nul in a json string": (
        *("a.jsonl", lines({"text": "a\0b", "label": 1}, {"text": "c", "label": 0})),
        *("a.jsonl:1, column 'text'", ["NUL"], "tr -d"),
    ),
    "half a surrogate pair": (
        *("a.jsonl", lines({"text": "a\ud800b", "label": 1}, {"text": "c", "label": 0})),
        *("a.jsonl:1, column 'text'", ["surrogate", "d800"], "UTF-8"),
    ),
    "half a surrogate pair in a label": (
        *("a.jsonl", lines({"text": "a", "label": "x"}, {"text": "b", "label": "\ud8000"})),
        *("a.jsonl:2, column 'label'", ["surrogate", "d800"], "UTF-8"),
    ),
    "half a surrogate pair among labels": (
        *("a.jsonl", lines({"text": "a", "label": ["x", "\udfff"]}, {"text": "b", "label": ["x"]})),
        *("a.jsonl:1, column 'label'", ["surrogate", "dfff"], "UTF-8"),
    ),
    "cut json line": (
        *("a.jsonl", lines({"text": "a", "label": 1}) + b'{"text": "b", "la'),
        *("a.jsonl:2", ["not JSON", "cut off"], "the file ends here"),
    ),
    "broken json line": (
        *("a.jsonl", b"{'text': 'a'}\n" + lines({"text": "a", "label": 1})),
        *("a.jsonl:1", ["not JSON", "character 2"], "one whole JSON object"),
    ),
    "deeply nested json": ("a.jsonl", b"[" * 200_000 + b"\n", "a.jsonl:1", ["nested too deeply"], "JSON object"),
    "key given twice": ("a.jsonl", b'{"text":"a","text":"b"}\n', "a.jsonl:1, column 'text'", ["twice"], "once"),
    "no object": ("a.jsonl", lines({"text": "a", "label": 1}, ["b", 1]), "a.jsonl:2", ["found a list"], "write {"),
    "a json array": ("a.jsonl", lines([{"text": "a", "label": 1}]), "a.jsonl:1", ["JSON array"], "jq -c"),
    "a json array over lines": ("a.jsonl", b'[\n{"text":"a"}]', "a.jsonl:1", ["not JSON"], "jq -c"),
    "missing key": (
        *("a.jsonl", lines({"text": "a", "label": 1}, {"text": "b"})),
        *("a.jsonl:2, column 'label'", ["no 'label' in this row", "it has 'text'"], "add 'label'"),
    ),
    "missing key in the first row": (
        *("a.jsonl", lines({"label": 1}, {"text": "b", "label": 0})),
        *("a.jsonl:1, column 'text'", ["no 'text' in this row"], "add 'text'"),
    ),
    "cut gzip": (
        *("a.csv.gz", gzip.compress(b"text,label\n" + b"".join(b"%d,x\n" % (n * n) for n in range(5000)))[:-400]),
        *("a.csv.gz:", ["cut off", "whole lines"], "gzip -t"),
    ),
    "not gzip": ("a.csv.gz", b"text,label\na,x\nb,y\n", "a.csv.gz:1", ["gzip"], "drop .gz"),
    "damaged gzip": (
        *("a.csv.gz", gzip.compress(b"text,label\n" + b"a,x\n" * 9)[:15] + b"\xff" * 30),
        *("a.csv.gz:1", ["gzip"], "gzip -t"),
    ),
    "words among numbers": (
        *("a.jsonl", lines({"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": "one"})),
        *("a.jsonl:3, column 'label'", ["mixed label types", "'one'", "numbers"], "write it as the others"),
    ),
    "lists among words": (
        *("a.jsonl", lines(*[{"text": "a", "label": x} for x in ("u", "v", ["u"])])),
        *("a.jsonl:3, column 'label'", ["mixed label types", "a list"], "write it as the others"),
    ),
    "booleans among numbers": (
        *("a.jsonl", lines(*[{"text": "a", "label": x} for x in (1, 0, True)])),
        *("a.jsonl:3, column 'label'", ["mixed label types", "'true'"], "write it as the others"),
    ),
    "label is an object": (
        *("a.jsonl", lines(*[{"text": "a", "label": x} for x in (1, {"name": "a"})])),
        *("a.jsonl:2, column 'label'", ["no usable type", "0 or 1 of each class"], "label"),
    ),
    "a word among targets": (
        *("a.csv", b"text,score\n" + b"".join(b"t%d,%d.5\n" % (n, n) for n in range(30)) + b'u,"1,5"\n'),
        *("a.csv:32, column 'score'", ["mixed label types", "'1,5'"], "write 1.5"),
    ),
    "NaN target": (
        *("a.csv", b"text,score\na,1.5\nb,nan\nc,2.5\n"),
        *("a.csv:3, column 'score'", ["not a finite number", "'nan'"], "fill in the number"),
    ),
    "infinite target": (
        "a.csv",
        b"text,y\na,1.5\nb,-inf\nc,2\n",
        "a.csv:3, column 'y'",
        ["finite", "'-inf'"],
        "fill in",
    ),
    "NaN class number": ("a.csv", b"text,y\na,1\nb,NaN\nc,2\n", "a.csv:3, column 'y'", ["finite", "'NaN'"], "fill in"),
    "NaN in json": (
        *("a.jsonl", b'{"text":"a","label":1}\n{"text":"b","label":NaN}\n{"text":"c","label":0}\n'),
        *("a.jsonl:2, column 'label'", ["not a finite number"], "fill in the number"),
    ),
    "empty text": ("a.csv", b"text,label\na,x\n  ,y\nc,x\n", "a.csv:3, column 'text'", ["text is empty"], "fill it in"),
    "null text": (
        *("a.jsonl", lines({"text": "a", "label": 1}, {"text": None, "label": 0})),
        *("a.jsonl:2, column 'text'", ["text is missing"], "fill it in"),
    ),
    "a number for a text": (
        *("a.jsonl", lines({"text": "a", "label": 1}, {"text": 7, "label": 0})),
        *("a.jsonl:2, column 'text'", ["no text", "found '7'", "int"], "in JSON in quotes"),
    ),
    "empty label": (
        "a.csv",
        b"text,label\na,x\nb,\nc,y\n",
        "a.csv:3, column 'label'",
        ["label is empty"],
        "fill it in",
    ),
    "null label": (
        "a.jsonl",
        lines({"text": "a", "label": None}),
        "a.jsonl:1, column 'label'",
        ["empty"],
        "fill it in",
    ),
    "unknown split": (
        *("a.csv", b"text,label,split\na,x,train\nb,y,tets\n"),
        *("a.csv:3, column 'split'", ["unknown split", "did you mean 'test'"], "data.split=null"),
    ),
    "empty split": ("a.csv", b"text,label,split\na,x,\n", "a.csv:2, column 'split'", ["unknown split"], "null"),
    "all one class": (
        "a.csv",
        b"text,label\na,x\nb,x\n",
        "a.csv:2, column 'label'",
        ["one class"],
        "allow_single_class",
    ),
    "class missing from train": (
        *("a.csv", b"text,label,split\na,x,train\nb,y,train\nc,z,test\n"),
        *("a.csv:4, column 'label'", ["missing from train", "'z'", "only x, y"], "move rows"),
    ),
    "no training row of the class": (
        *("a.csv", b"text,label,split\na,x,test\nb,y,train\nc,y,train\n"),
        *("a.csv:2, column 'label'", ["missing from train", "'x'"], "move rows"),
    ),
    "duplicate header": ("a.csv", b"text,label,text\na,x,b\n", "a.csv:1, column 'text'", ["twice"], "of its own"),
    "no header": ("a.csv", b"nice one,pos\nbad one,neg\n", "a.csv", ["no label column", "'nice one'"], "add a line"),
    "20 MB cell": (
        "a.csv",
        f"text,label\na,x\n{BIG},y\n".encode(),
        "a.csv:3, column 'text'",
        ["10 MB"],
        "cut the text",
    ),
    "20 MB json cell": (
        *("a.jsonl", lines({"text": "a", "label": 1}, {"text": BIG, "label": 0})),
        *("a.jsonl:2, column 'text'", ["10 MB", "20,000,000 characters"], "cut the text"),
    ),
    "80 MB line": (
        "a.jsonl",
        b'{"text": "' + 4 * BIG.encode(),
        "a.jsonl:1",
        ["a line of over 40 MB"],
        "one row a line",
    ),
    "one row": ("a.csv", b"text,label\na,x\n", "a.csv:2", ["1 row of data"], "add rows"),
    "quoted line breaks before": (
        *("a.csv", b'text,label\n"a\nb\r\n\nc",x\n\n"d\n\ne",y\nf\n'),
        *("a.csv:10, column 'label'", ["too short"], "missing cell"),
    ),
    "escape codes": ("a.csv", b"text,label\na,x\n\x1b[31mred\n", "a.csv:3", [r"'\x1b[31mred'"], "missing cell"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, tmp_path, monkeypatch):
    file, content, place, words, fix = CASES[name]
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        read(DataPart(source=file))
    message = str(caught.value)
    assert message.startswith(place), message
    assert caught.value.exit_code == 2
    for word in words:
        assert word in message
    assert fix in caught.value.fix
    assert "\x1b" not in message, "a file's bytes reached the terminal unescaped"
    assert len(message) < 1000


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\n")
    with pytest.raises(DataError, match=r"data.source = .*no such file") as caught:
        read(DataPart(source=str(tmp_path / "review.csv")))
    assert str(tmp_path / "reviews.csv") in caught.value.fix


def test_missing_folder(tmp_path):
    with pytest.raises(DataError, match="no such file") as caught:
        read(DataPart(source=str(tmp_path / "nowhere" / "a.csv")))
    assert "there is no folder" in caught.value.why


def test_missing_test_file_is_found_before_anything_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(DataError, match=r"data.test = "):
        read(DataPart(source=str(tmp_path / "a.csv"), test=str(tmp_path / "b.csv")))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.json.xz", "unxz"),
        ("a.xlsx.gz", ".csv"),
        ("a.txt", "folder per class"),
        ("a", ".csv"),
        ("a.gz", ".csv"),
    ],
)
def test_unknown_format(tmp_path, name, fix):
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="no reader for") as caught:
        read(DataPart(source=str(tmp_path / name)))
    assert fix in caught.value.fix


def test_unreadable_file_says_why(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")

    def refuse(self, *arguments, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(DataError, match="cannot be read") as caught:
        read(DataPart(source=str(tmp_path / "a.csv")))
    assert caught.value.why == "Permission denied"


def test_unknown_column(tmp_path):
    (tmp_path / "a.csv").write_text("review,stars\na,x\nb,y\n")
    with pytest.raises(DataError, match=r"a.csv: no column 'star'") as caught:
        read(DataPart(source=str(tmp_path / "a.csv"), label="star"))
    assert "did you mean 'stars'?" in caught.value.why
    assert "data.label" in caught.value.fix


def test_all_files_need_the_columns_of_the_first(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "b.csv").write_text("text,klass\na,x\nb,y\n")
    with pytest.raises(DataError, match=r"b.csv: no column 'label'") as caught:
        read(DataPart(source=str(tmp_path / "a.csv"), test=str(tmp_path / "b.csv")))
    assert "'klass'" in caught.value.why
    assert caught.value.fix == (
        f"--set data.test=null leaves it out, and paceline predict RUN {tmp_path}/b.csv labels its rows; or rename the"
        f" column to 'label', as in {tmp_path}/a.csv"
    )


def test_a_table_without_labels_in_a_folder_is_left_out_by_naming_the_others(tmp_path):
    for name, header in {"train": "text,label", "validation": "text,label", "test": "text,id"}.items():
        (tmp_path / f"{name}.csv").write_text(f"{header}\n{name} a,x\n{name} b,y\n")
    with pytest.raises(DataError, match=r"test.csv: no column 'label'") as caught:
        read(DataPart(source=str(tmp_path)))
    options = f"--data {tmp_path}/train.csv --set data.validation={tmp_path}/validation.csv"
    assert caught.value.fix.startswith(f"{options} leaves it out, and paceline predict RUN {tmp_path}/test.csv")
    part = DataPart(source=str(tmp_path / "train.csv"), validation=str(tmp_path / "validation.csv"))
    assert set(read(part).splits or ()) == {"train", "validation"}


def test_class_only_in_a_later_file(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "b.csv").write_text("text,label\nc,x\nd,z\n")
    with pytest.raises(DataError, match=r"b.csv:3, column 'label': a class that is missing from train \(found 'z'\)"):
        read(DataPart(source=str(tmp_path / "a.csv"), validation=str(tmp_path / "b.csv")))


@pytest.mark.parametrize(
    ("head", "label"),
    [(("x", "y", "z"), "z"), (("x", "y", "z"), "Z"), (("LABEL_0", "LABEL_1", "LABEL_2"), "2")],
    ids=["by name", "in another case", "by number"],
)
def test_a_class_of_later_rows_alone_that_the_head_knows(tmp_path, head, label):
    first, second = ("0", "1") if label == "2" else ("x", "y")
    (tmp_path / "a.csv").write_text(f"text,label\na,{first}\nb,{second}\n")
    (tmp_path / "b.csv").write_text(f"text,label\nc,{first}\nd,{label}\n")
    part = DataPart(source=str(tmp_path / "a.csv"), validation=str(tmp_path / "b.csv"))
    assert read(part, head=head).labels == [first, second, first, label]


def test_a_class_that_neither_train_nor_the_head_knows(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "b.csv").write_text("text,label\nc,z\nd,q\n")
    part = DataPart(source=str(tmp_path / "a.csv"), validation=str(tmp_path / "b.csv"))
    with pytest.raises(DataError, match=r"b.csv:3, column 'label': a class that is missing from train") as caught:
        read(part, head=("z", "x", "y"))
    assert "the training rows and the model's head have only x, y, z" in caught.value.why
    # a head for other classes is lost, and knows nothing of these
    with pytest.raises(DataError, match=r"b.csv:2, column 'label'") as caught:
        read(part, head=("z", "q"))
    assert "the training rows have only x, y" in caught.value.why


def test_a_split_is_given_once(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,split\na,x,train\nb,y,test\n")
    (tmp_path / "b.csv").write_text("text,label\nc,x\nd,y\n")
    with pytest.raises(DataError, match=r"a.csv:3, column 'split': the split is given twice"):
        read(DataPart(source=str(tmp_path / "a.csv"), test=str(tmp_path / "b.csv")))


def test_indicator_columns_hold_zero_or_one(tmp_path):
    (tmp_path / "a.csv").write_text("text,toxic,rude\na,0,1\nb,1,maybe\n")
    with pytest.raises(DataError, match=r"a.csv:3, column 'rude': neither 0 nor 1 \(found 'maybe'\)") as caught:
        read(DataPart(source=str(tmp_path / "a.csv"), label=("toxic", "rude")))
    assert "0 or 1" in caught.value.fix


def test_regression_that_was_asked_for_needs_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,two\n")
    with pytest.raises(DataError, match=r"a.csv:3, column 'label': mixed label types \(found 'two'\)"):
        read(DataPart(source=str(tmp_path / "a.csv")), task="regression")


def test_multi_label_that_was_asked_for_needs_several(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x;y\nb,y\n")
    with pytest.raises(DataError, match="needs several labels") as caught:
        read(DataPart(source=str(tmp_path / "a.csv")), task="multi_label")
    assert "label_separator" in caught.value.fix


def test_lists_are_no_single_label(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a", "label": ["x", "y"]}, {"text": "b", "label": ["x"]}))
    with pytest.raises(DataError, match="one label a row") as caught:
        read(DataPart(source=str(tmp_path / "a.jsonl")), task="classification")
    assert "task.type=multi_label" in caught.value.fix


def test_damaged_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a.parquet: not a whole parquet file") as caught:
        read(DataPart(source=str(tmp_path / "a.parquet")))
    assert "download it again" in caught.value.fix
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"a.parquet: the file is empty"):
        read(DataPart(source=str(tmp_path / "a.parquet")))


def test_a_folder_of_the_hubs_name_is_not_read_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets library would take ./imdb for the Hub's imdb without a word."""
    (tmp_path / "imdb").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="imdb is also here, in the current folder") as caught:
        read(DataPart(source="hub:imdb"))
    assert "--data imdb" in caught.value.fix


@pytest.mark.parametrize(
    ("module", "source", "command"),
    [
        ("pyarrow", "a.parquet", 'pip install "paceline[parquet]"'),
        ("datasets", "hub:someone/reviews", 'pip install "paceline[hub]"'),
        ("PIL", "pictures", 'pip install "paceline[images]"'),
    ],
)
def test_missing_extra_gives_the_command(tmp_path, monkeypatch, module, source, command):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.png").write_bytes(b"")
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="not installed") as caught:
        read(DataPart(source=source))
    assert caught.value.fix == command


def test_damaged_text_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    array = pyarrow.array([b"fine", b"caf\xe9"], type=pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"text": array, "label": ["x", "y"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:1: not a whole parquet file"):
        read(DataPart(source=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,text\nx,y\n"),
        ("a.csv", "text,label\nfine,a\nshort\n"),
        ("a.csv", 'text,label\nfine,a\n"open,b\n'),
        ("a.jsonl", '{"text": "fine", "label": "a"}\n{broken\n'),
    ],
)
def test_the_file_is_closed_also_when_the_error_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    opened = []
    original = Lines._open
    monkeypatch.setattr(Lines, "_open", lambda lines: opened.append(original(lines)) or opened[-1])
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as kept:
        read(DataPart(source=str(tmp_path / name)))
    assert kept.value is not None
    assert opened
    assert all(file.closed for file in opened)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.csv")
    with pytest.raises(DataError, match="is no regular file"):
        read(DataPart(source=str(tmp_path / "data.csv")))


@pytest.mark.parametrize("name", KNOWN)
def test_a_missing_download_names_the_command_that_fetches_it(tmp_path, name):
    folder = tmp_path / "data" / name
    with pytest.raises(DataError, match="no such file") as caught:
        read(DataPart(source=str(folder / "train.jsonl")))
    assert caught.value.fix == f"paceline data {name} {folder}"
    folder.mkdir(parents=True)  # as a download leaves it that has failed
    with pytest.raises(DataError, match="no such file") as caught:
        read(DataPart(source=str(folder / "train.jsonl")))
    assert caught.value.fix == f"paceline data {name} {folder}"


def test_the_folders_of_the_recipes_are_fetched_by_the_fix(tmp_path):
    for source, fix in {"cifar-10-batches-bin": "cifar10", "imdb": "imdb"}.items():
        with pytest.raises(DataError, match="no such file") as caught:
            read(DataPart(source=str(tmp_path / source)))
        assert caught.value.fix == f"paceline data {fix} {tmp_path / source}"
    with pytest.raises(DataError, match="no such file") as caught:
        read(DataPart(source=str(tmp_path / "imdb_train.csv")))
    assert caught.value.fix == "correct the path"
