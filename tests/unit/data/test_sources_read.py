"""Every kind of source gives the same table, with its places and guesses; and its fingerprint, without reading it."""

import gzip
import json
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled, source_fingerprint
from paceline.recipe.parts import DataPart

ROWS = [
    {"text": "nice, and cheap", "label": "pos", "split": "train"},
    {"text": 'they said "no"', "label": "neg", "split": "train"},
    {"text": "two\nlines", "label": "pos", "split": "valid"},
    {"text": "NA", "label": "neg", "split": "TEST"},
    {"text": "null", "label": "pos", "split": "test"},
    {"text": "None – schön ☃", "label": "None", "split": "train"},
]
CSV = (
    'text,label,split\r\n"nice, and cheap",pos,train\r\n"they said ""no""",neg,train\r\n"two\nlines",pos,valid\r\n'
    "NA,neg,TEST\r\nnull,pos,test\r\n\r\nNone – schön ☃,None,train"
)
TSV = CSV.replace('"nice, and cheap"', "nice; and cheap").replace(",", "\t").replace(";", ",")
JSON = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def write(path, content):
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def check(table):
    assert table.texts == [row["text"] for row in ROWS]
    assert table.labels == ["pos", "neg", "pos", "neg", "pos", "None"]
    assert table.splits == ["train", "train", "validation", "test", "test", "train"]
    assert table.kind == "classification"
    assert (table.pairs, table.images, table.tokens, table.rows) == (None, None, None, None)
    assert table.columns == {"text": "text", "label": "label", "split": "split"}
    assert len(table) == 6


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.csv", CSV, [2, 3, 4, 6, 7, 9]),
        ("a.csv.gz", CSV, [2, 3, 4, 6, 7, 9]),
        ("A.CSV", "\ufeff" + CSV, [2, 3, 4, 6, 7, 9]),
        ("a.tsv", TSV, [2, 3, 4, 6, 7, 9]),
        ("a.tsv.gz", TSV, [2, 3, 4, 6, 7, 9]),
        ("a.jsonl", JSON, [1, 2, 3, 4, 5, 6]),
        ("a.ndjson.gz", "\ufeff\n" + JSON.replace("\n", "\r\n\r\n"), [2, 4, 6, 8, 10, 12]),
    ],
)
def test_text_files(tmp_path, name, content, lines):
    file = write(tmp_path / name, content)
    table = read(DataPart(source=file))
    check(table)
    assert table.origins.lines.tolist() == lines
    assert table.origins.of(3) == f"{file}:{lines[3]}"
    assert any("text column: 'text' (guessed" in notice for notice in table.notices)


def test_parquet(tmp_path):
    table = read(DataPart(source=parquet(tmp_path / "a.parquet", ROWS)))
    check(table)
    assert table.origins.lines.tolist() == [1, 2, 3, 4, 5, 6]


def test_parquet_in_several_batches(tmp_path):
    rows = [{"text": f"text {n}", "label": n % 3} for n in range(3000)]
    table = read(DataPart(source=parquet(tmp_path / "a.parquet", rows)))
    assert table.texts == [row["text"] for row in rows]
    assert table.origins.lines[-1] == 3000


def test_list_of_dicts_and_iterators():
    check(read(DataPart(source="unused.csv"), rows=ROWS))
    check(read(DataPart(source="unused.csv"), rows=(dict(row) for row in ROWS)))


def test_columns_are_texts_as_those_of_a_data_frame():
    rows = [{0: row["text"], 1: row["label"]} for row in ROWS]
    table = read(DataPart(source="unused.csv", label="1"), rows=rows)
    assert (table.texts, table.columns) == ([row["text"] for row in ROWS], {"text": "0", "label": "1"})
    with pytest.raises(DataError, match=r"no label column found\n.*the columns '0', '1'"):
        read(DataPart(source="unused.csv"), rows=rows)


def test_data_frame():
    pandas = pytest.importorskip("pandas")
    table = read(DataPart(source="unused.csv"), rows=pandas.DataFrame(ROWS, index=range(100, 106)))
    check(table)
    assert table.origins.of(1) == "DataFrame:2"


def test_data_frame_with_missing_values_teaches():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", None, "c"], "label": [1, 0, 1]})
    with pytest.raises(DataError, match="DataFrame:2, column 'text': the text is missing") as caught:
        read(DataPart(source="unused.csv"), rows=frame)
    assert "keep_default_na=False" in caught.value.fix
    frame = pandas.DataFrame({"text": ["a", "b", "c"], "label": [1, np.nan, 0]})
    with pytest.raises(DataError, match="DataFrame:2, column 'label': the label is empty"):
        read(DataPart(source="unused.csv"), rows=frame)


def test_data_frame_of_numpy_numbers():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": list("abcd"), "label": np.array([0, 1, 0, 1], dtype=np.int8)})
    assert read(DataPart(source="unused.csv"), rows=frame).labels == ["0", "1", "0", "1"]


class FakeDataset:
    """What paceline uses of datasets.Dataset."""

    def __init__(self, rows, names=None):
        self._rows = rows
        self.column_names = list(rows[0])
        self.features = {column: SimpleNamespace(dtype="string") for column in self.column_names}
        if names:
            self.features["label"] = SimpleNamespace(names=names, int2str=names.__getitem__)

    def __iter__(self):
        return (dict(row) for row in self._rows)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, column):
        return [row[column] for row in self._rows]


def numbered(count, labels=(0, 1)):
    return [{"text": f"text {n}", "label": labels[n % len(labels)]} for n in range(count)]


def test_dataset_gives_class_names():
    table = read(DataPart(source="unused.csv"), rows=FakeDataset(numbered(4), ["bad", "good"]))
    assert table.labels == ["bad", "good", "bad", "good"]
    check(read(DataPart(source="unused.csv"), rows=FakeDataset(ROWS)))


def test_dataset_dict_gives_splits():
    names = ["bad", "good"]
    splits = {
        "test": FakeDataset(numbered(2), names),
        "unsupervised": FakeDataset(numbered(3), names),
        "train": FakeDataset(numbered(4), names),
        "validation": FakeDataset(numbered(2, (-1,)), names),
    }
    table = read(DataPart(source="unused.csv"), rows=splits)
    assert table.splits == ["train"] * 4 + ["test"] * 2
    assert any("ignored split 'unsupervised' (3 rows)" in notice for notice in table.notices)
    assert any("'validation': its 2 rows have no labels" in notice for notice in table.notices)
    assert read(DataPart(source="unused.csv"), rows={"train": splits["train"]}).splits is None


@pytest.mark.parametrize("rows", [7, "a.csv", {"text": ["a"]}, [["a", 1]]])
def test_other_things_in_memory_are_refused(rows):
    with pytest.raises(DataError):
        read(DataPart(source="unused.csv"), rows=rows)


def hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return {"train": FakeDataset(numbered(4), ["bad", "good"]), "test": FakeDataset(numbered(2), ["bad", "good"])}

    hub(monkeypatch, load_dataset)
    table = read(DataPart(source="hub:someone/reviews:small"))
    assert asked == [("someone/reviews", "small")]
    assert table.splits == ["train"] * 4 + ["test"] * 2
    assert table.origins.of(4) == "hub:someone/reviews:small[test]:1"
    assert source_fingerprint(DataPart(source="hub:someone/reviews:small")) is None


@pytest.mark.parametrize(
    ("error", "words", "fix"),
    [
        (ConnectionError("Couldn't reach 'x/y' on the Hub (OfflineModeIsEnabled)"), "cannot be reached", "go online"),
        (FileNotFoundError("Dataset 'x/y' doesn't exist on the Hub"), "cannot be loaded", "check the name"),
        (ValueError("Config name is missing.\nPlease pick one: ['a', 'b']"), "which configuration", "hub:x/y:CONF"),
    ],
)
def test_hub_errors_teach(monkeypatch, error, words, fix):
    def load_dataset(*arguments):
        raise error

    hub(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=words) as caught:
        read(DataPart(source="hub:x/y"))
    assert fix in caught.value.fix


def test_pairs(tmp_path):
    file = write(tmp_path / "a.csv", "premise,hypothesis,label\na,b,x\nc,d,y\n")
    table = read(DataPart(source=file))
    assert (table.texts, table.pairs) == (["a", "c"], ["b", "d"])
    assert table.columns == {"text": "premise", "pair": "hypothesis", "label": "label"}


def test_files_of_their_own_for_validation_and_test(tmp_path):
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    validation = write(tmp_path / "validation.jsonl", '{"label": "y", "text": "c"}\n')
    test = write(tmp_path / "test.tsv", "label\ttext\nx\td\n")
    table = read(DataPart(source=train, validation=validation, test=test))
    assert table.texts == ["a", "b", "c", "d"]
    assert table.labels == ["x", "y", "y", "x"]
    assert table.splits == ["train", "train", "validation", "test"]
    assert [table.origins.of(n) for n in (1, 2, 3)] == [f"{train}:3", f"{validation}:1", f"{test}:2"]


def test_a_split_column_beside_a_test_file(tmp_path):
    source = write(tmp_path / "a.csv", "text,label,split\na,x,train\nb,y,train\nc,y,dev\n")
    test = write(tmp_path / "b.csv", "text,label,split\nd,x,anything\n")
    assert read(DataPart(source=source, test=test)).splits == ["train", "train", "validation", "test"]
    assert read(DataPart(source=source, test=test, split=None)).splits == ["train", "train", "train", "test"]


def test_no_splits_named_is_none(tmp_path):
    assert read(DataPart(source=write(tmp_path / "a.csv", "text,label\na,x\nb,y\n"))).splits is None


def test_unlabelled_rows_are_kept_for_writing(tmp_path):
    file = write(tmp_path / "a.csv", "id,text,split\n7,a,x\n8,b,y\n")
    (table,) = unlabelled(DataPart(source=file))
    assert (table.labels, table.kind, table.splits) == (None, None, None)
    assert table.rows == [{"id": "7", "text": "a", "split": "x"}, {"id": "8", "text": "b", "split": "y"}]
    (single,) = unlabelled(DataPart(source=write(tmp_path / "b.csv", "text\nalone\n")))
    assert single.texts == ["alone"]


def unlabelled(part, size=100):
    return list(read_unlabelled(part, size, tell=lambda notice: None))


def test_unlabelled_rows_come_a_table_at_a_time(tmp_path):
    file = write(tmp_path / "a.csv", "text\n" + "".join(f"t{n}\n" for n in range(250)))
    tables = unlabelled(DataPart(source=file), size=120)
    assert [len(table) for table in tables] == [120, 120, 10]
    assert [text for table in tables for text in table.texts] == [f"t{n}" for n in range(250)]
    assert tables[2].origins.of(9) == f"{file}:251", "line numbers go on"


def test_unlabelled_rows_tell_what_was_guessed_and_dropped(tmp_path):
    file = write(tmp_path / "a.csv", "text\n" + "fine\n" * 99 + "a,b\n")
    told = []
    part = DataPart(source=file, on_bad_row="skip")
    (table,) = read_unlabelled(part, 1000, tell=told.append)
    assert len(table) == 99
    assert ["guessed" in told[0], "dropped 1 of 100 rows" in told[1]] == [True, True], told


def test_one_class_where_it_is_allowed(tmp_path):
    file = write(tmp_path / "a.csv", "text,label\na,x\nb,x\n")
    assert read(DataPart(source=file, allow_single_class=True)).labels == ["x", "x"]


def tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    return str(root)


def test_folder_per_class_of_texts(tmp_path):
    root = tree(
        tmp_path / "texts", {"b/2.txt": "two", "b/1.txt": "\ufeffone", "a/x.txt": "ex", "a/.hidden": "", "a/n.md": "#"}
    )
    table = read(DataPart(source=root))
    assert (table.texts, table.labels, table.splits) == (["ex", "one", "two"], ["a", "b", "b"], None)
    assert table.origins.of(1) == f"{root}/b/1.txt"
    assert table.notices == (f"{root}: ignored 1 .md file(s)",)


def test_folder_with_splits_as_the_imdb_archive(tmp_path):
    files = {
        f"{split}/{label}/{n}_9.txt": f"{split} {label} {n}"
        for split in ("train", "test")
        for label in ("pos", "neg")
        for n in range(3)
    }
    root = tree(tmp_path / "aclImdb", files | {"train/unsup/0_0.txt": "?", "imdb.vocab": "the", "train/urls.txt": "u"})
    table = read(DataPart(source=root))
    assert len(table) == 12
    assert table.splits == ["test"] * 6 + ["train"] * 6
    assert table.labels == (["neg"] * 3 + ["pos"] * 3) * 2
    assert table.texts[0] == "test neg 0"
    assert any("'unsup'" in notice for notice in table.notices)
    assert any("1 file(s) beside the class folders" in notice for notice in table.notices)
    assert read(DataPart(source=root, split=None)).splits is None


def test_folder_of_unlabelled_texts(tmp_path):
    root = tree(tmp_path / "new", {"1.txt": "one", "2.txt": "two"})
    (table,) = unlabelled(DataPart(source=root))
    assert table.texts == ["one", "two"]
    assert table.rows == [{"text": "one", "file": "1.txt"}, {"text": "two", "file": "2.txt"}]
    with pytest.raises(DataError, match="no folder per class"):
        read(DataPart(source=root))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train/a/1.txt": "x", "train/b/1.txt": "y", "other/1.txt": "z"}, "side by side"),
        ({"a/1.txt": "x", "b/1.png": "y"}, "texts and images"),
        ({"a/1.md": "x"}, "no texts, images or tables"),
    ],
)
def test_folders_that_are_not_understood(tmp_path, files, words):
    with pytest.raises(DataError, match=words):
        read(DataPart(source=tree(tmp_path / "root", files)))


def test_bad_texts_in_a_folder_name_their_file(tmp_path):
    root = tree(tmp_path / "root", {"a/1.txt": "x", "b/1.txt": "fine\n", "b/2.txt": " \n"})
    with pytest.raises(DataError, match=r"b/2.txt, column 'text': the text is empty"):
        read(DataPart(source=root))
    (tmp_path / "root/b/2.txt").write_bytes(b"one\ncaf\xe9")
    with pytest.raises(DataError, match=r"b/2.txt:2: not UTF-8") as caught:
        read(DataPart(source=root))
    assert "byte offset 7" in caught.value.why


def test_tables_may_have_names_that_are_not_utf_8(tmp_path):
    (tmp_path / os.fsdecode(b"d\xe9j\xe0")).mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for path in tmp_path.glob("a.*"):
        moved = path.rename(tmp_path / os.fsdecode(b"d\xe9j\xe0") / f"{os.fsdecode(bytes([0xE9]))}{path.suffix}")
        check(read(DataPart(source=str(moved))))


def test_files_may_have_names_that_are_not_utf_8_and_classes_not(tmp_path):
    odd = os.fsdecode(b"caf\xe9")
    root = tree(tmp_path / "root", {f"a/{odd}.txt": "x", f"a/{odd}/2.txt": "", f"b/2.{odd}": "", "b/1.txt": "y"})
    table = read(DataPart(source=root))
    assert [notice.count(r"caf\udce9") for notice in table.notices] == [1, 1], "the summary could not hold these"
    assert (table.labels, table.origins.of(0)) == (["a", "b"], f"{root}/a/{odd}.txt")
    assert source_fingerprint(DataPart(source=root))
    (tmp_path / "root/b").rename(tmp_path / "root" / odd)
    with pytest.raises(DataError, match=r"class is not UTF-8 \(found 'caf\\udce9'\)"):
        read(DataPart(source=root))
    (table,) = unlabelled(DataPart(source=root))
    assert table.texts == ["x", "y"], "classes are looked at where none is needed"


def test_fingerprint_is_of_bytes_and_of_settings(tmp_path):
    file = write(tmp_path / "a.csv", "text,label,review\na,x,c\nb,y,d\n")
    part = DataPart(source=file)
    first = source_fingerprint(part)
    assert source_fingerprint(part.model_copy(update={"max_length": 64})) == first, "tokenising is no reading"
    assert source_fingerprint(part.model_copy(update={"text": "review"})) != first
    assert source_fingerprint(DataPart(source=write(tmp_path / "b.csv", "text,label,review\na,x,c\nb,y,d\n"))) == first
    assert source_fingerprint(part.model_copy(update={"test": file})) != first
    write(tmp_path / "a.csv", "text,label,review\na,x,c\nb,y,e\n")
    assert source_fingerprint(part) != first


def test_fingerprint_of_a_folder_sees_every_file(tmp_path):
    root = tree(tmp_path / "root", {"a/1.txt": "x", "b/1.txt": "y"})
    first = source_fingerprint(DataPart(source=root))
    tree(tmp_path / "root", {"b/1.txt": "z"})
    second = source_fingerprint(DataPart(source=root))
    tree(tmp_path / "root", {"b/2.txt": "z"})
    assert len({first, second, source_fingerprint(DataPart(source=root))}) == 3


def test_builtin_is_handed_over(monkeypatch):
    given = []
    monkeypatch.setitem(sys.modules, "paceline.data.builtin", SimpleNamespace(read_builtin=given.append))
    part = DataPart(source="builtin:digits")
    read(part)
    assert given == [part]
    assert source_fingerprint(part) is None
    with pytest.raises(DataError, match="brings its own splits"):
        read(DataPart(source="builtin:digits", test="a.csv"))


def test_memory_and_time_stay_in_line_with_the_file(tmp_path):
    import tracemalloc

    rows = [json.dumps({"text": f"{n} " + "word " * 200, "label": n % 2}) for n in range(5000)]
    file = write(tmp_path / "a.jsonl.gz", "\n".join(rows))
    size = sum(map(len, rows))
    del rows
    start = time.perf_counter()
    read(DataPart(source=file))
    seconds = time.perf_counter() - start
    tracemalloc.start()
    try:
        table = read(DataPart(source=file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 5000
    assert peak < 1.6 * size, "the file is held beside its rows"
    assert seconds < 2, "50,000 reviews would take over 20 s"
