"""Tables of picture files: read where the model takes images, refused or doubted where it takes texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from paceline.contract.errors import DataError
from paceline.data.prepare import outline
from paceline.data.sources import read, read_unlabelled
from paceline.data.table import Table
from paceline.recipe.parts import DataPart, TaskPart


def pictures(folder: Path, count: int = 4) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{at}.png" for at in range(count)]
    for at, name in enumerate(names):
        Image.fromarray(np.full((8, 8), at, np.uint8)).save(folder / name)
    return names


def table(path: Path, names: list[str], column: str = "file_name", **more: list[str]) -> DataPart:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {column: names, **more, "label": ["cat", "dog"] * (len(names) // 2)}
    lines = [",".join(columns), *(",".join(cells) for cells in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return DataPart(source=str(path))


def levels(found: Table) -> list[int]:
    assert found.images is not None
    return found.images[:, 0, 0, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("column", ["file_name", "filename", "image", "Path", "图片", "whatever", "text"])
@pytest.mark.parametrize("modality", ["image", "any"])
def test_a_column_of_picture_files_is_of_images(tmp_path: Path, column: str, modality: str) -> None:
    part = table(tmp_path / "a.csv", pictures(tmp_path), column)
    found = read(part, modality=modality)
    assert (levels(found), found.labels, found.names_files) == ([0, 1, 2, 3], ["cat", "dog"] * 2, True)
    assert found.columns == {"image": column, "label": "label"}
    assert found.origins.of(0) == f"{part.source}:2"
    assert len(read(part.model_copy(update={"text": column}), modality=modality)) == 4


def test_names_with_folders_are_below_the_tables(tmp_path: Path) -> None:
    names = [f"pictures/{name}" for name in pictures(tmp_path / "pictures")]
    assert levels(read(table(tmp_path / "a.csv", names), modality="image")) == [0, 1, 2, 3]
    windows = [name.replace("/", "\\") for name in names]
    assert levels(read(table(tmp_path / "b.csv", windows), modality="image")) == [0, 1, 2, 3]
    absolute = [str(tmp_path / name) for name in names]
    assert levels(read(table(tmp_path / "far/c.csv", absolute), modality="image")) == [0, 1, 2, 3]


def test_the_folder_of_the_pictures_may_be_left_out(tmp_path: Path) -> None:
    names = pictures(tmp_path / "images")
    (tmp_path / "other").mkdir()
    part = table(tmp_path / "train.csv", names)
    found = read(part, modality="image")
    assert levels(found) == [0, 1, 2, 3]
    assert f"{part.source}: the pictures that it names are read from {tmp_path / 'images'}" in found.notices
    pictures(tmp_path / "masks")
    with pytest.raises(DataError, match="in which folder are the pictures"):
        read(part, modality="image")


def test_folders_named_like_the_splits_hold_their_pictures(tmp_path: Path) -> None:
    """As competitions have it: numbers begin again in each split."""
    for split, count in (("train", 4), ("test", 2)):
        table(tmp_path / f"{split}.csv", pictures(tmp_path / split, count))
    found = read(DataPart(source=str(tmp_path)), modality="image")
    assert (levels(found), found.splits) == ([0, 1, 2, 3, 0, 1], ["train"] * 4 + ["test"] * 2)


@pytest.mark.parametrize("name", ["metadata.csv", "train/metadata.csv"])
@pytest.mark.parametrize("inner", ["", "images/"])
def test_the_metadata_of_a_folder_of_images(tmp_path: Path, name: str, inner: str) -> None:
    names = pictures((tmp_path / "set" / name).parent / inner)
    table(tmp_path / "set" / name, [f"{inner}{each}" for each in names])
    found = read(DataPart(source=str(tmp_path / "set")), modality="image")
    assert levels(found) == [0, 1, 2, 3]
    assert not any("ignored" in notice for notice in found.notices)


def test_captions_are_not_taken_by_a_model_of_images(tmp_path: Path) -> None:
    part = table(tmp_path / "a.csv", pictures(tmp_path), "image", text=["a cat", "a dog", "two cats", "no dog"])
    assert read(part, modality="image").images is not None
    assert read(part, modality="text").texts == ["a cat", "a dog", "two cats", "no dog"]
    assert read(part, modality="any").texts is not None


@pytest.mark.parametrize("column", ["file_name", "image", "text", "review"])
def test_a_model_of_texts_does_not_learn_names_of_pictures(tmp_path: Path, column: str) -> None:
    part = table(tmp_path / "a.csv", pictures(tmp_path), column)
    with pytest.raises(DataError, match="names of picture files in place of texts") as caught:
        read(part, modality="text")
    assert caught.value.column == column
    named = read(part.model_copy(update={"text": column}), modality="text")
    assert named.texts == ["0.png", "1.png", "2.png", "3.png"]
    assert any("holds names of files, which are learned as texts" in notice for notice in named.notices)


def test_a_model_of_texts_does_not_learn_names_of_texts(tmp_path: Path) -> None:
    names = ["1.txt", "2.txt"]
    for name in names:
        (tmp_path / name).write_text("a text")
    with pytest.raises(DataError, match="names of files in place of texts"):
        read(table(tmp_path / "a.csv", names, "text"), modality="text")
    assert read(table(tmp_path / "elsewhere/a.csv", names, "text"), modality="text").texts == names
    assert read(table(tmp_path / "b.csv", ["see 1.txt", "1.txt"], "text"), modality="text").texts is not None


def test_texts_that_speak_of_pictures_are_texts(tmp_path: Path) -> None:
    part = table(tmp_path / "a.csv", ["see cat.png", "no", "cat.png", "dog.jpg"], "text")
    assert read(part, modality="text").texts is not None
    assert read(part, modality="any").texts is not None


def test_a_picture_that_is_missing_is_a_row_that_cannot_be_used(tmp_path: Path) -> None:
    part = table(tmp_path / "a.csv", [*pictures(tmp_path, 3), "9.png"])
    with pytest.raises(DataError, match=r"a.csv:5, column 'file_name': no such picture"):
        read(part, modality="image")
    found = read(part.model_copy(update={"on_bad_row": "skip", "bad_rows_allowed": 0.5}), modality="image")
    assert levels(found) == [0, 1, 2]
    part = table(tmp_path / "a.csv", ["https://example.org/1.png"] * 2)
    with pytest.raises(DataError, match="a picture's address"):
        read(part, modality="image")
    with pytest.raises(DataError, match="File name too long"):
        read(table(tmp_path / "a.csv", ["x" * 999 + ".png"] * 2), modality="image")


def test_a_table_without_pictures_says_how_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pictures found") as caught:
        read(table(tmp_path / "a.csv", ["1", "2"], "id"), modality="image")
    assert "file_name" in caught.value.fix
    assert "FOLDER/CLASS" in caught.value.fix


@pytest.mark.parametrize("kind", ["frame", "texts", "series", "paths"])
def test_names_from_python_begin_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    names = pictures(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows: dict[str, Any] = {
        "frame": pandas.DataFrame({"image": names}),
        "texts": names,
        "series": pandas.Series(names),
        "paths": list(map(Path, names)),
    }
    part = DataPart(source="memory")
    (found,) = read_unlabelled(part, 9, rows=rows[kind], tell=lambda notice: None, modality="image")
    assert levels(found) == [0, 1, 2, 3]
    if kind != "paths":
        assert [next(iter(row.values())) for row in found.rows or ()] == names, "the names are written out again"
    assert levels(read(part, rows=(rows[kind] if kind != "frame" else names, list("abab")), modality="image"))


def test_pictures_that_a_table_names_are_read_at_each_start(tmp_path: Path) -> None:
    """The table's bytes do not say whether a picture was replaced."""
    part = table(tmp_path / "a.csv", pictures(tmp_path, 40)).model_copy(update={"image_size": 8})
    cache = tmp_path / "cache"

    def content() -> str:
        found = outline(part, TaskPart(), tokenizer=None, modality="image", cache=cache)
        return found.finish(lambda: None).fingerprint

    first = content()
    assert not cache.exists() or not os.listdir(cache)
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(tmp_path / "3.png")
    assert content() != first
