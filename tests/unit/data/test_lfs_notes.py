"""A repository cloned without git-lfs holds pointers where its data should be: every reader says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read
from paceline.recipe.parts import DataPart

NOTE = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *((f"a{suffix}", f"a{suffix}") for suffix in (".csv", ".tsv", ".jsonl", ".json", ".csv.gz", ".json.gz")),
        *((f"a{suffix}", f"a{suffix}") for suffix in (".parquet", ".arrow", ".xlsx", ".xls", ".xlsb", ".ods")),
        ("texts/good/1.txt", "texts"),
        ("tables/train.csv", "tables"),
        ("pictures/good/1.png", "pictures"),
        ("cifar/data_batch_1.bin", "cifar"),
    ],
)
def test_a_note_in_place_of_data_is_named(name: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NOTE)
    with pytest.raises(DataError, match="git-lfs's note") as caught:
        read(DataPart(source=str(tmp_path / source)))
    assert str(caught.value).endswith(f"fix: cd {path.parent} && git lfs pull")
    assert Path(caught.value.file) == path


def test_a_note_in_place_of_a_saved_data_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "data.arrow").write_text(NOTE)
    with pytest.raises(DataError, match="git-lfs's note"):
        read(DataPart(source=str(tmp_path)))


def test_a_text_that_speaks_of_git_lfs_is_a_text(tmp_path: Path) -> None:
    rows = "".join(f"version https://git-lfs is {n},{n % 2}\n" for n in range(4))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    assert len(read(DataPart(source=str(tmp_path / "a.csv")))) == 4
