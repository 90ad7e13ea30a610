"""A source that changes between its fingerprint and its reading is neither trained on nor remembered."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from paceline.contract.errors import DataError
from paceline.data import sources
from paceline.data.encode import wanted
from paceline.data.prepare import Given, outline, prepare_to_evaluate
from paceline.recipe.parts import DataPart, SplitsPart, TaskPart
from tests.unit.data.test_cifar import write_cifar
from tests.unit.data.test_prepare import Words
from tests.unit.data.test_sources_arrow import saved

Row = dict[str, Any]


def rows_of(word: str) -> list[Row]:
    return [{"text": f"{word} w{row}", "label": ("good", "bad")[row % 2]} for row in range(20)]


def write_lines(path: Path, word: str) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(word)))


def write_array(path: Path, word: str) -> None:
    path.write_text(json.dumps(rows_of(word)))


def write_gzip(path: Path, word: str) -> None:
    lines = [f"{row['text']},{row['label']}\n" for row in rows_of(word)]
    path.write_bytes(gzip.compress("".join(["text,label\n", *lines]).encode(), mtime=0))


def write_parquet(path: Path, word: str) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(word)), path)


def write_excel(path: Path, word: str) -> None:
    book = openpyxl.Workbook()
    for row in [("text", "label"), *(tuple(row.values()) for row in rows_of(word))]:
        book.active.append(row)
    book.save(path)


def write_saved(folder: Path, word: str) -> None:
    saved(folder, rows_of(word))


def write_texts(folder: Path, word: str) -> None:
    for number, row in enumerate(rows_of(word)):
        (folder / row["label"]).mkdir(parents=True, exist_ok=True)
        (folder / row["label"] / f"{number}.txt").write_text(row["text"])


def write_pictures(folder: Path, word: str) -> None:
    for number in range(20):
        name = folder / ("good", "bad")[number % 2]
        name.mkdir(parents=True, exist_ok=True)
        level = number + 100 * (word == "w2")
        Image.fromarray(np.full((8, 8), level, dtype=np.uint8)).save(name / f"{number}.png")


KINDS: dict[str, Callable[[Path, str], None]] = {
    "rows.jsonl": write_lines,
    "rows.json": write_array,
    "rows.csv.gz": write_gzip,
    "rows.parquet": write_parquet,
    "rows.xlsx": write_excel,
    "saved": write_saved,
    "texts": write_texts,
    "pictures": write_pictures,
    "cifar": lambda folder, word: void(write_cifar(folder, seed=int(word[1:]))),
}


def void(_: object) -> None:
    """Drop a result."""


def part_of(path: Path, **settings: Any) -> DataPart:
    return DataPart(source=str(path), max_length=16, splits=SplitsPart(validation=4, test=4), **settings)


def prepare(part: DataPart, cache: Path | None, modality: str) -> Any:
    return outline(part, TaskPart(), tokenizer=Words(), modality=modality, cache=cache).finish(wanted)


def replace(path: Path, other: Path) -> None:
    """Put a copy of ``other`` in the place of ``path``, file by file, with its old modification times."""
    if path.is_dir():
        for file in [each for each in other.rglob("*") if each.is_file()]:
            replace(path / file.relative_to(other), file)
        return
    before = path.stat()
    copy = path.with_name(f"{path.name}.copy")
    shutil.copy(other, copy)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("is_put_back", [False, True], ids=["replaced", "replaced and put back"])
@pytest.mark.parametrize("name", KINDS)
def test_a_source_that_is_replaced_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_put_back: bool
) -> None:
    for word, folder in (("w1", "old"), ("w2", "new"), ("w1", "here")):
        (tmp_path / folder).mkdir()
        KINDS[name](tmp_path / folder / name, word)
    path, cache = tmp_path / "here" / name, tmp_path / "cache"
    modality = "image" if name in ("pictures", "cifar") else "text"
    read = sources.read

    def read_late(*arguments: Any, **options: Any) -> Any:
        replace(path, tmp_path / "new" / name)
        table = read(*arguments, **options)
        if is_put_back:
            replace(path, tmp_path / "old" / name)
        return table

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read", read_late)
        with pytest.raises(DataError, match="changed while they were being read"):
            prepare(part_of(path), cache, modality)
    assert not cache.exists(), "rows of unknown origin are remembered"
    replace(path, tmp_path / "old" / name)
    expected = prepare(part_of(path), None, modality).fingerprint
    assert prepare(part_of(path), cache, modality).fingerprint == expected
    assert prepare(part_of(path), cache, modality).fingerprint == expected, "of the cache"
    replace(path, tmp_path / "new" / name)
    assert prepare(part_of(path), cache, modality).fingerprint != expected, "this test changes nothing"


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"text": "w3", "label": "good"}) + "\n")


@pytest.mark.parametrize("changed", ["rows.jsonl", "held.jsonl", "link.jsonl"])
@pytest.mark.parametrize("has_cache", [False, True])
def test_any_file_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, has_cache: bool) -> None:
    for name, word in (("rows.jsonl", "w1"), ("held.jsonl", "w2"), ("real.jsonl", "w4"), ("other.jsonl", "w5")):
        write_lines(tmp_path / name, word)
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    part = part_of(
        tmp_path / "rows.jsonl", validation=str(tmp_path / "held.jsonl"), test=str(tmp_path / "link.jsonl")
    ).model_copy(update={"splits": SplitsPart()})
    read = sources.read

    def read_and_change(*arguments: Any, **options: Any) -> Any:
        table = read(*arguments, **options)
        if changed == "link.jsonl":
            (tmp_path / changed).unlink()
            (tmp_path / changed).symlink_to("other.jsonl")
        else:
            append(tmp_path / changed)
        return table

    monkeypatch.setattr(sources, "read", read_and_change)
    with pytest.raises(DataError, match="changed while they were being read") as caught:
        prepare(part, tmp_path / "cache" if has_cache else None, "text")
    assert caught.value.file == str(tmp_path / changed)
    assert not (tmp_path / "cache").exists()


def test_a_file_that_joins_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "texts", "w1")
    read = sources.read

    def read_and_add(*arguments: Any, **options: Any) -> Any:
        table = read(*arguments, **options)
        (tmp_path / "texts" / "good" / "more.txt").write_text("w7")
        return table

    monkeypatch.setattr(sources, "read", read_and_add)
    with pytest.raises(DataError, match="changed while they were being read"):
        prepare(part_of(tmp_path / "texts"), None, "text")


def test_an_evaluation_notices_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "rows.jsonl", "w1")
    read = sources.read

    def read_and_change(*arguments: Any, **options: Any) -> Any:
        table = read(*arguments, **options)
        append(tmp_path / "rows.jsonl")
        return table

    given = Given(
        tokenizer=Words().get([]), max_length=16, label_names=("bad", "good"), kind="classification", modality="text"
    )
    assert len(prepare_to_evaluate(part_of(tmp_path / "rows.jsonl"), given)) == 20
    monkeypatch.setattr(sources, "read", read_and_change)
    with pytest.raises(DataError, match="changed while they were being read"):
        prepare_to_evaluate(part_of(tmp_path / "rows.jsonl"), given)


def test_reading_alone_changes_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", "w1")
    os.utime(tmp_path / "rows.jsonl", (0, 0))  # so that relatime updates the time of access
    assert len(prepare(part_of(tmp_path / "rows.jsonl"), tmp_path / "cache", "text")) == 20
