"""Small files that would take all memory or no end of time: refused before the first step, or read in their stride."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.columns import find_roles
from paceline.data.dataset import Origins
from paceline.data.labels import encode_labels
from paceline.data.sources import read, rows
from paceline.data.sources.rows import repeated
from paceline.data.splits import split_rows
from paceline.recipe.parts import DataPart
from paceline.recipe.parts.data import SplitsPart

COLUMNS, CLASSES = 100_000, 40_000
"""So many that what is quadratic in their number runs into the time limit of tests."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as large from a megabyte on."""
    monkeypatch.setattr(rows, "LARGE_BYTES", 2**20)


def refusal(source: Path, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(DataPart(source=str(source), **settings))
    return caught.value


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("a.json.gz", '[{"text": "', '", "label": 1}]'),
        ("a.jsonl.gz", '{"text": "', '", "label": 1}'),
        ("a.csv.gz", "text,label\n", ",x\n"),
    ],
)
def test_a_compressed_file_that_expands_a_thousandfold_is_refused(
    name: str, begin: str, end: str, tmp_path: Path
) -> None:
    with gzip.open(tmp_path / name, "wt", compresslevel=9) as file:
        file.write(begin + "a" * 3_000_000 + end)
    error = refusal(tmp_path / name)
    assert "expand to" in str(error)
    assert f"gzip -dk {tmp_path / name}" in error.fix


def test_an_honest_compressed_file_is_read(tmp_path: Path) -> None:
    lines = (f"the shop was the {number}th today,{'xy'[number % 2]}\n" for number in range(2000))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(("text,label\n" + "".join(lines)).encode()))
    assert len(read(DataPart(source=str(tmp_path / "a.csv.gz")))) == 2000


class TestParquet:
    @pytest.fixture(autouse=True)
    def _needs_arrow(self) -> None:
        self.pyarrow = pytest.importorskip("pyarrow")
        self.parquet = pytest.importorskip("pyarrow.parquet")

    def write(self, path: Path, texts: Any, labels: Any, **settings: Any) -> Path:
        table = self.pyarrow.table({"text": texts, "label": labels})
        self.parquet.write_table(table, path, compression="zstd", **settings)
        return path

    def repeated(self, value: str, count: int) -> Any:
        return self.pyarrow.DictionaryArray.from_arrays(np.zeros(count, np.int32), [value])

    def test_of_many_equal_rows_is_refused(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", self.repeated("a", 1_500_000), self.repeated("x", 1_500_000))
        assert "1,500,000 rows in" in str(refusal(path))

    @pytest.mark.usefixtures("small")
    def test_of_a_large_value_that_its_dictionary_repeats_is_refused(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", self.repeated("a" * 100_000, 1000), self.repeated("x", 1000))
        assert path.stat().st_size < 3000
        assert "expand to" in str(refusal(path))

    @pytest.mark.usefixtures("small")
    def test_of_one_large_value_is_refused_before_it_is_read(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.parquet", ["a" * 5_000_000, "b"], ["x", "y"], use_dictionary=False)
        error = refusal(path)
        assert "expand to 5,000," in str(error)
        assert error.line is None

    def test_of_honest_rows_is_read(self, tmp_path: Path) -> None:
        texts = [f"the {number}th text " + "word " * 100 for number in range(5000)]
        path = self.write(tmp_path / "a.parquet", texts, ["x", "y"] * 2500, row_group_size=1000)
        assert read(DataPart(source=str(path))).texts == texts


class TestArrow:
    @pytest.fixture(autouse=True)
    def _needs_arrow(self) -> None:
        self.pyarrow = pytest.importorskip("pyarrow")

    def write(self, path: Path, *batches: tuple[Any, Any], is_stream: bool = False) -> Path:
        tables = [self.pyarrow.record_batch({"text": texts, "label": labels}) for texts, labels in batches]
        new = self.pyarrow.ipc.new_stream if is_stream else self.pyarrow.ipc.new_file
        options = self.pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with self.pyarrow.OSFile(str(path), "wb") as file, new(file, tables[0].schema, options=options) as writer:
            for table in tables:
                writer.write_batch(table)
        return path

    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.usefixtures("small")
    def test_of_compressed_batches_is_refused_while_it_expands(self, is_stream: bool, tmp_path: Path) -> None:
        batch = (["a" * 1_000_000, "b"], ["x", "y"])
        path = self.write(tmp_path / "a.arrow", *[batch] * 9, is_stream=is_stream)
        assert "expand to" in str(refusal(path))

    @pytest.mark.usefixtures("small")
    def test_of_a_large_value_that_its_dictionary_repeats_is_refused(self, tmp_path: Path) -> None:
        texts = self.pyarrow.DictionaryArray.from_arrays(np.zeros(1000, np.int32), ["a" * 10_000])
        path = self.write(tmp_path / "a.arrow", (texts, ["x", "y"] * 500))
        assert "expand to" in str(refusal(path))

    def test_of_one_run_of_equal_rows_is_refused(self, tmp_path: Path) -> None:
        run = self.pyarrow.RunEndEncodedArray.from_arrays(self.pyarrow.array([2**31 - 1], "int32"), ["hello"])
        assert "2,147,483,647 rows in" in str(refusal(self.write(tmp_path / "a.arrow", (run, run))))

    def test_of_honest_rows_is_read(self, tmp_path: Path) -> None:
        texts = [f"the {number}th text " + "word " * 100 for number in range(5000)]
        labels = ["x", "y"] * 2500
        path = self.write(tmp_path / "a.arrow", (texts, labels), (texts, labels), is_stream=True)
        assert read(DataPart(source=str(path))).texts == [*texts, *texts]


class TestIntegers:
    @pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
    def test_of_thousands_of_digits_are_refused(self, name: str, tmp_path: Path) -> None:
        row = '{"text": "a", "label": %s}'
        content = (row % ("1" * 5000), row % "1")
        (tmp_path / name).write_text("\n".join(content) if name == "a.jsonl" else f"[{','.join(content)}]")
        assert "an integer of over 4,300 digits" in refusal(tmp_path / name).why

    def test_as_labels_of_a_file_are_refused(self, tmp_path: Path) -> None:
        rows = [{"text": "a", "label": 10**4000}, {"text": "b", "label": [10**4000]}]
        for row in rows:
            (tmp_path / "a.jsonl").write_text(json.dumps(row) + '\n{"text": "b", "label": 1}\n')
            assert "an integer of over 1,000 digits" in refusal(tmp_path / "a.jsonl").why
        (tmp_path / "a.csv").write_text(f"text,label\na,{'1' * 5000}\nb,1\n")
        assert "over 1,000 characters" in str(refusal(tmp_path / "a.csv"))

    @pytest.mark.parametrize("row", [{"text": "a", "label": 10**5000}, {"text": 10**5000, "label": 1}])
    def test_in_memory_are_refused_in_words(self, row: dict[str, Any]) -> None:
        with pytest.raises(DataError, match="too large to show"):
            read(DataPart(), rows=[row, {"text": "b", "label": 2}])


@pytest.mark.parametrize("depth", [400, 900, 990, 100_000])
def test_nested_values_are_passed_over_or_refused(depth: int, tmp_path: Path) -> None:
    nested = "[" * depth + "]" * depth
    row = f'{{"text": "a", "label": 0, "x": {nested}}}'
    for name, content in (("a.jsonl", f"{row}\n"), ("a.json", f"[{row}]")):
        (tmp_path / name).write_text(content)
        assert type(refusal(tmp_path / name, on_bad_row="skip", bad_rows_allowed=1)) is DataError


def test_many_columns_take_no_longer_than_their_number() -> None:
    columns = [f"c{number}" for number in range(COLUMNS)]
    assert repeated(columns) is None
    assert repeated([*columns, "c7"]) == "c7"
    roles = find_roles(DataPart(label=tuple(columns)), ["text", *columns], [{"text": "a b"}], file="a.csv")
    assert len(roles.label) == COLUMNS
    with pytest.raises(DataError, match="no label column") as caught:
        find_roles(DataPart(), columns, [{}], file="a.csv")
    assert len(str(caught.value)) < 2000


def test_a_long_name_of_a_column_is_shortened(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,{'c' * 100_000}\na,b\n")
    assert len(str(refusal(tmp_path / "a.csv"))) < 1000


def test_many_classes_take_no_longer_than_their_number() -> None:
    names = [f"class {number}" for number in range(CLASSES)]
    labels = [name for name in names for _ in range(3)]
    keys = np.arange(len(labels))
    splits = split_rows(labels, "classification", keys, None, SplitsPart()).splits
    origins = Origins(
        files=("a.csv",), file_index=np.zeros(len(labels), np.int32), lines=np.arange(len(labels), dtype=np.int64)
    )
    encoded = encode_labels(labels, "classification", splits, origins, order=names[::-1])
    assert len(encoded.names) == CLASSES
    assert encoded.names[0] == names[-1]


JSON_LINES = {
    "commas": ('{"text": "a", "label": 1},\n{"text": "b", "label": 0}\n', "sed 's/,[[:space:]]*$//' < "),
    "one object over lines": ('{\n  "text": "a",\n  "label": 1\n}\n', "jq -c . "),
    "carriage returns": ('{"text": "a", "label": 1}\r{"text": "b", "label": 0}\r', r"tr '\r' '\n' < "),
}


@pytest.mark.parametrize("name", JSON_LINES)
def test_json_that_is_no_json_lines_is_refused_with_the_command_that_makes_it_some(name: str, tmp_path: Path) -> None:
    content, command = JSON_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    assert command in refusal(tmp_path / "a.jsonl").fix
