"""A folder of tables: a table a split, or pieces of one; what is not clear is asked."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import openpyxl
import pyarrow
import pyarrow.parquet
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled, source_fingerprint
from paceline.recipe.parts import DataPart

Rows = list[dict[str, str]]


def rows(name: str) -> Rows:
    return [{"text": f"{name} {at}", "label": "ab"[at]} for at in range(2)]


def write(path: Path, table: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        schema = pyarrow.schema([("text", pyarrow.string()), ("label", pyarrow.string())])
        return pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table, schema), path)
    if kind == "xlsx":
        book = openpyxl.Workbook()
        for cells in (("text", "label"), *((row["text"], row["label"]) for row in table)):
            book.active.append(cells)
        return book.save(path)
    mark = {"csv": ",", "tsv": "\t"}.get(kind)
    lines = [mark.join(("text", "label")), *(mark.join(row.values()) for row in table)] if mark else []
    content = json.dumps(table) if kind == "json" else "\n".join(lines or map(json.dumps, table))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return None


def folder(root: Path, *names: str) -> DataPart:
    root.mkdir(exist_ok=True)
    for name in names:
        write(root / name, rows(name))
    return DataPart(source=str(root))


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "csv.gz", "jsonl.gz", "parquet", "xlsx"])
@pytest.mark.parametrize("validation", ["val", "validation", "dev"])
def test_a_table_a_split(tmp_path: Path, kind: str, validation: str) -> None:
    part = folder(tmp_path / "set", f"test.{kind}", f"train.{kind}", f"{validation}.{kind}")
    table = read(part)
    assert table.splits == ["train"] * 2 + ["validation"] * 2 + ["test"] * 2
    assert table.texts is not None
    assert table.texts[::2] == [f"{name}.{kind} 0" for name in ("train", validation, "test")]
    assert table.labels == ["a", "b"] * 3
    assert any(f"reads train.{kind} as train, {validation}.{kind} as validation" in each for each in table.notices)


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001-6d1ad6c7.parquet"),
        ("imdb_train.csv", "imdb_test.csv"),
        ("Train.csv", "TEST.csv"),
        ("train1.jsonl", "train2.jsonl", "test1.jsonl"),
        ("train/part-0.csv", "train/part-1.csv", "test/part-0.csv"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("训练集.csv", "测试集.csv"),
    ],
)
def test_splits_are_known_by_words_of_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    table = read(folder(tmp_path / "set", *names))
    assert table.splits == ["train"] * 2 * (len(names) - 1) + ["test"] * 2


@pytest.mark.parametrize(
    "names",
    [
        ("reviews.csv",),
        ("part-00000.csv", "part-00001.csv"),
        ("part.0.parquet", "part.1.parquet", "part.10.parquet"),
        (
            "part-00000-0f4e7f1c-5d3a-4a6e-9abc-0a1b2c3d4e5f-c000.snappy.parquet",
            "part-00001-1a2b3c4d-aaaa-bbbb-cccc-ddddeeeeffff-c000.snappy.parquet",
        ),
        ("2019.tsv", "2020.tsv"),
        ("train.csv",),
    ],
)
def test_pieces_are_one_table(tmp_path: Path, names: tuple[str, ...]) -> None:
    part = folder(tmp_path / "set", *names)
    (tmp_path / "set/_SUCCESS").touch()
    (tmp_path / "set/~$reviews.csv").touch()
    (tmp_path / "set/.part-0.crc").touch()
    table = read(part)
    assert (table.splits, len(table)) == (None, 2 * len(names))
    assert table.origins.files == tuple(f"{part.source}/{name}" for name in names)
    assert [len(each) for each in read_unlabelled(part, 100, tell=lambda notice: None)] == [2] * len(names)


def test_a_piece_may_be_empty(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "part-0.parquet", "part-1.parquet")
    write(tmp_path / "set/part-0.parquet", [])
    table = read(part)
    assert len(table) == 2
    assert f"{part.source}/part-0.parquet: holds no rows" in table.notices
    write(tmp_path / "set/part-1.parquet", [])
    with pytest.raises(DataError, match="only a header, no rows"):
        read(part)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("reviews.csv", "products.csv"), "which table is to be read?"),
        (("train.csv", "train (1).csv"), "which table is train?"),
        (("train.csv", "train.csv.gz"), "which table is train?"),
        (("train.csv", "train.jsonl"), "which table is train?"),
        (("reviews.csv", "test.csv"), "which table is train?"),
        (("train-00000-of-00003.parquet", "train-00002-of-00003.parquet"), "2 of 3 pieces"),
    ],
)
def test_what_is_not_clear_is_asked(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(folder(tmp_path / "set", *names))
    assert words in str(caught.value)


def test_what_is_passed_over_is_named(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "train.csv", "test.csv", "sample_submission.csv")
    (tmp_path / "set/README.md").touch()
    notices = read(part).notices
    assert f"{part.source}: ignored 1 table(s) that name no split: sample_submission.csv" in notices
    assert f"{part.source}: ignored 1 .md file(s)" in notices


def test_settings_in_json_are_no_tables(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "train.parquet", "test.parquet")
    (tmp_path / "set/dataset_infos.json").write_text("{}")
    assert len(read(part)) == 4


def test_pictures_in_one_folder_beside_tables_are_no_class(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "train.csv", "test.csv")
    (tmp_path / "set/images").mkdir()
    (tmp_path / "set/images/1.png").touch()
    assert read(part).splits == ["train"] * 2 + ["test"] * 2


def test_a_split_is_given_once(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "train.csv", "test.csv")
    write(tmp_path / "more.csv", rows("more"))
    with pytest.raises(DataError, match=r"test.csv: the split is given twice"):
        read(part.model_copy(update={"test": str(tmp_path / "more.csv")}))
    more = part.model_copy(update={"validation": str(tmp_path / "more.csv")})
    assert read(more).splits == ["train"] * 2 + ["test"] * 2 + ["validation"] * 2
    with pytest.raises(DataError, match="holds several splits"):
        read(DataPart(source=str(tmp_path / "more.csv"), test=part.source))


def test_a_split_may_be_a_folder_of_pieces(tmp_path: Path) -> None:
    train, test = folder(tmp_path / "a", "1.csv", "2.csv"), folder(tmp_path / "b", "1.csv", "2.csv")
    assert read(train.model_copy(update={"test": test.source})).splits == ["train"] * 4 + ["test"] * 4


def test_the_fingerprint_is_of_the_tables(tmp_path: Path) -> None:
    part = folder(tmp_path / "set", "train.csv", "test.csv")
    first = source_fingerprint(part)
    (tmp_path / "set/README.md").write_text("more")
    assert source_fingerprint(part) == first
    write(tmp_path / "set/test.csv", rows("other"))
    assert source_fingerprint(part) != first


def test_links_of_tables(tmp_path: Path) -> None:
    """The Hub's cache holds links to files that are named by digests."""
    part = folder(tmp_path / "set", "train.csv")
    write(tmp_path / "blobs/x.csv", rows("blob"))
    (tmp_path / "blobs/x.csv").rename(tmp_path / "blobs" / ("0" * 64))
    os.symlink("../blobs/" + "0" * 64, tmp_path / "set/test.csv")
    table = read(part)
    assert table.splits == ["train"] * 2 + ["test"] * 2
    assert any("1 link leads out of the folder" in notice for notice in table.notices)
    (tmp_path / "blobs" / ("0" * 64)).unlink()
    with pytest.raises(DataError, match=r"test.csv: a link to nothing"):
        read(part)
    (tmp_path / "set/test.csv").unlink()
    (tmp_path / "passwd").write_text("root:x:0")
    os.symlink("../passwd", tmp_path / "set/test.csv")
    with pytest.raises(DataError, match="a link to a file of another kind"):
        read(part)
