"""Arrow files and what ``save_to_disk`` leaves, made by pyarrow as datasets makes them."""

import json
import sys

import pyarrow
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled, source_fingerprint
from paceline.recipe.parts import DataPart

NAMES = ["neg", "pos"]
LABEL = {"names": NAMES, "_type": "ClassLabel"}
TEXT = {"dtype": "string", "_type": "Value"}
ROWS = [{"text": f"text {number}", "label": number % 2} for number in range(5)]


def arrow(path, rows, features=None, *, is_stream=True):
    table = pyarrow.Table.from_pylist(rows)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    new = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    return path


def saved(folder, *shards, features=None, **state):
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{len(shards):05d}.arrow" for at in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        arrow(folder / name, rows, features)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


def saved_splits(folder, **splits):
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, rows in splits.items():
        saved(folder / split, rows, features={"text": TEXT, "label": LABEL})
    return folder


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_single_file(tmp_path, is_stream):
    rows = [{"text": row["text"], "label": NAMES[row["label"]]} for row in ROWS]
    path = arrow(tmp_path / "a.arrow", rows, is_stream=is_stream)
    table = read(DataPart(source=str(path)))
    assert table.texts == [row["text"] for row in ROWS]
    assert table.labels == ["neg", "pos", "neg", "pos", "neg"]
    assert table.origins.of(4) == f"{path}:5"


def test_a_saved_data_set_of_several_files_has_class_names(tmp_path):
    folder = saved(tmp_path / "set", ROWS[:2], ROWS[2:], features={"text": TEXT, "label": LABEL})
    table = read(DataPart(source=str(folder)))
    assert table.labels == ["neg", "pos", "neg", "pos", "neg"]
    assert table.splits is None
    assert table.origins.of(4) == f"{folder}:5"


@pytest.mark.parametrize(
    "feature", [{"feature": LABEL, "_type": "Sequence"}, {"feature": LABEL, "_type": "List"}, [LABEL]]
)
def test_lists_of_class_numbers_have_names_too(tmp_path, feature):
    rows = [{"text": "a", "labels": [0, 1]}, {"text": "b", "labels": [1]}, {"text": "c", "labels": []}]
    folder = saved(tmp_path / "set", rows, features={"text": TEXT, "labels": feature})
    table = read(DataPart(source=str(folder)))
    assert table.kind == "multi_label"
    assert table.labels == [("neg", "pos"), ("pos",), ()]


def test_a_saved_dict_of_data_sets_has_its_splits(tmp_path):
    unlabelled = [{"text": "a", "label": -1}]
    folder = saved_splits(tmp_path / "set", test=unlabelled, validation=ROWS[3:], train=ROWS[:3], extra=ROWS)
    table = read(DataPart(source=str(folder)))
    assert table.splits == ["train"] * 3 + ["validation"] * 2
    assert table.labels == ["neg", "pos", "neg", "pos", "neg"]
    assert table.origins.of(3) == f"{folder}[validation]:1"
    assert any("ignored split 'extra' (5 rows)" in notice for notice in table.notices)
    assert any("'test': its 1 rows have no labels" in notice for notice in table.notices)


def test_one_split_of_a_saved_dict_is_predicted_for(tmp_path):
    folder = saved_splits(tmp_path / "set", train=ROWS, test=[{"text": "a", "label": -1}])
    (table,) = read_unlabelled(DataPart(source=str(folder / "test")), 10, tell=lambda notice: None)
    assert table.texts == ["a"]


def test_a_split_of_its_own_is_one_data_set(tmp_path):
    folder = saved_splits(tmp_path / "set", train=ROWS, validation=ROWS)
    table = read(DataPart(source=str(folder / "train"), validation=str(folder / "validation")))
    assert table.splits == ["train"] * 5 + ["validation"] * 5
    with pytest.raises(DataError, match=r"data.validation = .*holds several splits") as caught:
        read(DataPart(source=str(folder / "train"), validation=str(folder)))
    assert f"data.validation={folder}/validation" in caught.value.fix


def test_the_fingerprint_is_of_every_file(tmp_path):
    folder = saved_splits(tmp_path / "set", train=ROWS, validation=ROWS)
    part = DataPart(source=str(folder))
    first = source_fingerprint(part)
    assert first == source_fingerprint(part)
    arrow(folder / "validation" / "data-00000-of-00001.arrow", ROWS[:3], {"text": TEXT, "label": LABEL})
    assert first != source_fingerprint(part)


def damage_state(folder):
    (folder / "state.json").write_text("{")


def lose_file(folder):
    (folder / "data-00000-of-00001.arrow").unlink()


def cut_file(folder):
    file = folder / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-200])


def empty_file(folder):
    (folder / "data-00000-of-00001.arrow").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (damage_state, "not a whole saved data set"),
        (lose_file, "data-00000-of-00001.arrow is missing"),
        (cut_file, "not a whole Arrow file"),
        (empty_file, "the file is empty"),
    ],
)
def test_damage_is_told(tmp_path, change, words):
    folder = saved(tmp_path / "set", ROWS, features={"text": TEXT, "label": LABEL})
    change(folder)
    with pytest.raises(DataError, match=words):
        read(DataPart(source=str(folder)))


def test_class_numbers_need_names(tmp_path):
    folder = saved(tmp_path / "set", [*ROWS, {"text": "x", "label": 2}], features={"text": TEXT, "label": LABEL})
    with pytest.raises(DataError, match="set:6, column 'label': a class number without a name"):
        read(DataPart(source=str(folder)))


def test_rows_chosen_by_an_index_are_refused(tmp_path):
    folder = saved(tmp_path / "set", ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="chooses its rows by an index") as caught:
        read(DataPart(source=str(folder)))
    assert "flatten_indices" in caught.value.fix


def test_a_folder_with_arrow_files_alone_is_read(tmp_path):
    for at in range(2):
        arrow(tmp_path / f"imdb-train-{at:05d}-of-00002.arrow", ROWS, {"text": TEXT, "label": LABEL})
    table = read(DataPart(source=str(tmp_path)))
    assert table.labels == ["neg", "pos", "neg", "pos", "neg"] * 2


def test_without_pyarrow_the_command_is_given(tmp_path, monkeypatch):
    path = arrow(tmp_path / "a.arrow", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="need pyarrow") as caught:
        read(DataPart(source=str(path)))
    assert caught.value.fix == 'pip install "paceline[parquet]"'
