"""From a source to an encoded data set, and back from the cache without reading the source again."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data import cache as entries
from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.encode import wanted
from paceline.data.prepare import Given, outline, prepare_to_evaluate, prepare_to_predict
from paceline.data.table import Table
from paceline.recipe.parts import DataPart, RandomPart, SplitsPart, TaskPart

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(50))]


@dataclass
class Words:
    """A tokenizer of whole words that remembers the texts it was offered for training."""

    key: str = "words"
    offered: list[list[str]] = field(default_factory=list)

    def get(self, training_texts: Iterable[str]) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        self.offered.append(list(training_texts))
        vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token="[PAD]",
            unk_token="[UNK]",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )


def _rows(num_rows: int = 40) -> list[dict[str, Any]]:
    return [
        {"text": f"w{row} " + "w1 " * (row % 7), "label": ("good", "bad")[row % 2], "id": row}
        for row in range(num_rows)
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _part(path: Path | str, **settings: Any) -> DataPart:
    usual = {"splits": SplitsPart(validation=4, test=8), "text": "text", "label": "label", "max_length": 16}
    return DataPart(source=str(path), **(usual | settings))


def _prepare(part: DataPart, cache: Path | None, tokenizer: Words | None = None, **options: Any) -> Dataset:
    options = {"modality": "text", "task": TaskPart()} | options
    return outline(part, options.pop("task"), tokenizer=tokenizer or Words(), cache=cache, **options).finish(wanted)


def _same(one: Dataset, other: Dataset) -> bool:
    assert isinstance(one.inputs, Tokens)
    assert isinstance(other.inputs, Tokens)
    return (
        np.array_equal(one.inputs.flat, other.inputs.flat)
        and np.array_equal(one.inputs.offsets, other.inputs.offsets)
        and np.array_equal(one.labels, other.labels)
        and one.label_names == other.label_names
        and all(np.array_equal(one.splits[name], other.splits[name]) for name in ("train", "validation", "test"))
        and one.origins.files == other.origins.files
        and np.array_equal(one.origins.lines, other.origins.lines)
        and one.fingerprint == other.fingerprint
    )


def test_texts_are_split_labelled_and_encoded(tmp_path: Path) -> None:
    tokenizer = Words()
    dataset = _prepare(_part(_write(tmp_path / "data.jsonl", _rows())), None, tokenizer)
    assert isinstance(dataset.inputs, Tokens)
    assert {name: len(ids) for name, ids in dataset.splits.items()} == {"train": 28, "validation": 4, "test": 8}
    assert dataset.kind == "classification"
    assert dataset.label_names == ("bad", "good")
    assert dataset.labels.tolist() == [1, 0] * 20
    sample = dataset.inputs.flat[dataset.inputs.offsets[2] : dataset.inputs.offsets[3]]
    assert [VOCABULARY[token] for token in sample] == ["[CLS]", "w2", "w1", "w1", "[SEP]"]
    assert dataset.origins.of(2).endswith("data.jsonl:3")
    rows = _rows()
    offered = [text.split() for text in tokenizer.offered[0]]
    assert offered == [rows[row]["text"].split() for row in dataset.splits["train"]], "only training texts are offered"


def test_what_a_model_is_built_for_is_known_before_a_text_is_encoded(tmp_path: Path) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    options: dict[str, Any] = {"tokenizer": Words(), "modality": "text", "cache": cache}
    found = outline(part, TaskPart(), **options)
    assert (found.kind, found.label_names, found.pad_id) == ("classification", ("bad", "good"), 0)
    assert (len(found.tokenizer), found.image_shape, found.cached) == (len(VOCABULARY), None, None)
    assert not cache.exists(), "the texts have been encoded already"
    dataset = found.finish(lambda: None)
    assert _same(dataset, _prepare(part, None))
    again = outline(part, TaskPart(), **options)
    assert again.cached is not None
    assert (again.kind, again.label_names, again.pad_id) == (found.kind, found.label_names, found.pad_id)
    assert _same(again.finish(lambda: None), dataset)


def test_encoding_ends_when_it_is_no_longer_wanted(tmp_path: Path) -> None:
    part = _part(_write(tmp_path / "data.jsonl", _rows()))
    cache = tmp_path / "cache"
    found = outline(part, TaskPart(), tokenizer=Words(), modality="text", cache=cache)

    def unwanted() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        found.finish(unwanted)
    assert not cache.exists(), "half a data set is remembered"


def test_what_happens_on_the_gpu_does_not_encode_anew(tmp_path: Path) -> None:
    path, cache = _write(tmp_path / "data.jsonl", _rows()), tmp_path / "cache"
    _prepare(_part(path), cache)
    _prepare(_part(path, resident=False, augment={"flip": True}), cache)
    assert len(list(cache.iterdir())) == 1


def test_texts_are_cut_to_the_recipes_length(tmp_path: Path) -> None:
    part = _part(_write(tmp_path / "data.jsonl", _rows()), max_length=5)
    dataset = _prepare(part, None)
    assert isinstance(dataset.inputs, Tokens)
    assert dataset.inputs.lengths.max() == 5


def test_the_second_time_nothing_is_parsed_or_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    first = _prepare(part, cache)
    monkeypatch.setattr("paceline.data.sources.read", None)
    tokenizer = Words()
    second = _prepare(part, cache, tokenizer)
    assert tokenizer.offered == []
    assert _same(first, second)
    assert first.notices == second.notices
    assert isinstance(second.inputs, Tokens)
    assert isinstance(second.inputs.flat.base, np.memmap), "tokens stay on the disk"


def test_cached_and_fresh_are_equal(tmp_path: Path) -> None:
    part = _part(_write(tmp_path / "data.jsonl", _rows()))
    assert _same(_prepare(part, tmp_path / "cache"), _prepare(part, None))


def test_the_cache_keeps_how_long_texts_were(tmp_path: Path) -> None:
    path = _write(tmp_path / "data.jsonl", _rows())
    fresh, cached = (_prepare(_part(path, max_length=5), tmp_path / "cache").inputs for _ in range(2))
    uncut = _prepare(_part(path), None).inputs
    assert isinstance(fresh, Tokens)
    assert isinstance(cached, Tokens)
    assert isinstance(uncut, Tokens)
    assert int(uncut.lengths.max()) > 5, "nothing was cut"
    assert fresh.whole is not None
    assert cached.whole is not None
    assert fresh.whole.tolist() == cached.whole.tolist() == uncut.lengths.tolist()
    assert uncut.whole is None


@pytest.mark.parametrize(
    "change",
    [
        {"part": {"splits": SplitsPart(validation=4, test=8, seed=1)}},
        {"part": {"label": "id"}},
        {"part": {"max_length": 5}},
        {"tokenizer": Words(key="other words")},
        {"task": TaskPart(type="classification")},
    ],
    ids=["splits", "columns", "max_length", "tokenizer", "task"],
)
def test_what_decides_the_result_makes_another_entry(tmp_path: Path, change: dict[str, Any]) -> None:
    path, cache = _write(tmp_path / "data.jsonl", _rows()), tmp_path / "cache"
    _prepare(_part(path), cache)
    _prepare(_part(path, **change.pop("part", {})), cache, **change)
    assert len(list(cache.iterdir())) == 2


def test_changed_content_is_read_again(tmp_path: Path) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    before = _prepare(part, cache)
    _write(tmp_path / "data.jsonl", _rows(44))
    after = _prepare(part, cache)
    assert (len(before), len(after)) == (40, 44)
    assert before.fingerprint != after.fingerprint


def test_fingerprints_follow_content_not_the_path(tmp_path: Path) -> None:
    one, other = (_prepare(_part(_write(tmp_path / name, _rows())), None) for name in ("a.jsonl", "b.jsonl"))
    changed = _prepare(_part(_write(tmp_path / "c.jsonl", [*_rows(39), {"text": "w9", "label": "bad", "id": 0}])), None)
    assert one.fingerprint == other.fingerprint != changed.fingerprint


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *itertools.product(["flat.npy", "offsets.npy", "labels.npy", "meta.json", "meta.sha256"], ["cut", "gone"]),
        *itertools.product(["flat.npy", "offsets.npy", "labels.npy", "split_train.npy", "meta.json"], ["changed"]),
    ],
)
def test_a_damaged_entry_is_made_anew(tmp_path: Path, file: str, damage: str) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    first = _prepare(part, cache)
    first_again = _prepare(part, None)
    [entry] = cache.iterdir()
    content = (entry / file).read_bytes()
    (entry / file).unlink()
    if damage == "cut":
        (entry / file).write_bytes(content[:-1])
    elif damage == "changed":
        (entry / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = _prepare(part, cache)
    assert _same(first_again, second)
    assert any("is damaged" in notice for notice in second.notices)
    assert _prepare(part, cache).notices == first.notices, "the new entry is whole and knows nothing of the damage"
    assert list(cache.iterdir()) == [entry], "nothing is left over"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("file", ["flat.npy", "labels.npy", "meta.json", "meta.sha256"])
@pytest.mark.parametrize("plant", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_an_entry_with_a_pipe_in_it_is_encoded_again(tmp_path: Path, file: str, plant: Callable[[Path], None]) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    first = _prepare(part, cache)
    [entry] = cache.iterdir()
    (entry / file).unlink()
    plant(entry / file)
    second = _prepare(part, cache)
    assert _same(first, second)
    assert any(f"{file} is no regular file" in notice for notice in second.notices)
    assert list(cache.iterdir()) == [entry], "nothing is left over"


def test_an_entry_cannot_carry_objects(tmp_path: Path) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    _prepare(part, cache)
    [entry] = cache.iterdir()
    # even an entry whose checksums are right
    np.save(entry / "lines.npy", np.array([print], dtype=object), allow_pickle=True)
    content = (entry / "lines.npy").read_bytes()
    meta = json.loads((entry / "meta.json").read_text())
    meta["arrays"]["lines"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (entry / "meta.json").write_text(json.dumps(meta))
    (entry / "meta.sha256").write_text(hashlib.sha256((entry / "meta.json").read_bytes()).hexdigest())
    with pytest.raises(entries.DamagedEntry, match="allow_pickle"):
        entries.load(entry)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    part = _part(_write(tmp_path / "data.jsonl", _rows()))
    (tmp_path / "file").write_text("in the way")
    dataset = _prepare(part, tmp_path / "file" / "cache")
    assert len(dataset) == 40
    assert any("cannot be kept" in notice for notice in dataset.notices)


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(entries, "fsync_file", full)
    dataset = _prepare(part, cache)
    assert any("No space left on device" in notice for notice in dataset.notices)
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_half_written_is_removed_a_day_later(tmp_path: Path) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    old, young, strange = (cache / f".{key * 32}.{'a1' * 4}" for key in "bcg")
    for folder in (old, young, strange):
        (folder / "part").mkdir(parents=True)
    for folder in (old, strange):
        os.utime(folder, (0, 0))
    _prepare(part, cache)
    left = {path.name for path in cache.iterdir() if path.name.startswith(".")}
    assert left == {young.name, strange.name}, "another process may be at work in the young one; the other is no entry"


def test_a_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    rename = Path.rename

    def rename_after_the_other(self: Path, target: Path) -> Path:
        if not target.name.startswith("."):  # our entry takes its place
            monkeypatch.setattr(Path, "rename", rename)
            _prepare(part, cache)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_after_the_other)
    dataset = _prepare(part, cache)
    assert not any("cannot be kept" in notice for notice in dataset.notices)
    assert len(list(cache.iterdir())) == 1, "nothing is left over"
    assert _same(dataset, _prepare(part, None))


CONTENDER = """
import sys
from pathlib import Path
from paceline.data.encode import wanted
from paceline.data.prepare import outline
from paceline.recipe.parts import DataPart, TaskPart

cache = Path(sys.argv[1])
for _ in range(30):
    part = DataPart(source="builtin:random")
    dataset = outline(part, TaskPart(), tokenizer=None, modality="text", cache=cache).finish(wanted)
    assert not any("cannot be kept" in notice for notice in dataset.notices), dataset.notices
    print(dataset.fingerprint, int(dataset.inputs.flat.sum()))
    for entry in cache.glob("[!.]*/labels.npy"):
        entry.unlink(missing_ok=True)  # so that everyone always has something to replace
assert "torch" not in sys.modules
"""


def test_processes_at_once_share_one_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTENDER, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({line for text in printed for line in text.splitlines()}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1, "nothing is left over"


def test_entries_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = os.umask(0o022)
    try:
        _prepare(_part(_write(tmp_path / "data.jsonl", _rows())), cache)
    finally:
        os.umask(before)
    [entry] = cache.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755, "a team can share one cache folder"


def test_rows_in_memory_are_not_cached(tmp_path: Path) -> None:
    dataset = _prepare(_part("rows"), tmp_path / "cache", rows=_rows())
    assert len(dataset) == 40
    assert not (tmp_path / "cache").exists()


def test_pairs_know_where_the_second_text_begins(tmp_path: Path) -> None:
    rows = [{**row, "other": "w3 w4"} for row in _rows()]
    tokenizer = Words()
    part, cache = _part(_write(tmp_path / "data.jsonl", rows), pair="other"), tmp_path / "cache"
    for dataset in (_prepare(part, cache, tokenizer), _prepare(part, cache)):
        assert isinstance(dataset.inputs, Tokens)
        assert dataset.inputs.second is not None
        assert dataset.inputs.second[2] == 5
        assert dataset.inputs.lengths[2] == 8
    assert len(tokenizer.offered[0]) == 2 * len(dataset.splits["train"]), "both texts train a tokenizer"


@pytest.mark.parametrize("kind", ["regression", "multi_label"])
def test_a_task_that_the_data_have_no_labels_for_is_refused(kind: str) -> None:
    part, task = DataPart(source="builtin:random"), TaskPart(type=kind)
    with pytest.raises(DataError, match=f"task.type = {kind}: builtin:random is for classification"):
        outline(part, task, tokenizer=None, modality="any", cache=None)


def test_multi_label(tmp_path: Path) -> None:
    rows = [{"text": f"w{row}", "label": ["a", "b"] if row % 3 else ["c"]} for row in range(40)]
    dataset = _prepare(_part(_write(tmp_path / "data.jsonl", rows)), tmp_path / "cache")
    assert dataset.kind == "multi_label"
    assert dataset.label_names == ("a", "b", "c")
    assert dataset.labels[:2].tolist() == [[0, 0, 1], [1, 1, 0]]


def test_regression(tmp_path: Path) -> None:
    rows = [{"text": f"w{row}", "score": row / 4} for row in range(40)]
    part = _part(_write(tmp_path / "data.jsonl", rows), label="score")
    dataset = _prepare(part, tmp_path / "cache", task=TaskPart(type="regression"))
    assert dataset.kind == "regression"
    assert dataset.label_names == ("score",)
    assert dataset.labels.dtype == np.float32
    assert dataset.labels.tolist() == [row / 4 for row in range(40)]


def test_builtin_images_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = DataPart(source="builtin:digits")
    first = outline(part, TaskPart(), tokenizer=None, modality="image", cache=tmp_path).finish(wanted)
    monkeypatch.setattr("paceline.data.sources.read", None)
    second = outline(part, TaskPart(), tokenizer=None, modality="image", cache=tmp_path).finish(wanted)
    assert isinstance(first.inputs, Images)
    assert isinstance(second.inputs, Images)
    assert second.inputs.pixels.shape == (1797, 8, 8, 1)
    assert np.array_equal(first.inputs.pixels, second.inputs.pixels)
    assert second.label_names == tuple("0123456789")


def test_random_tokens_need_no_tokenizer_and_are_cut() -> None:
    part = DataPart(source="builtin:random", random=RandomPart(samples=20, length=(10, 60)), max_length=32)
    dataset = outline(part, TaskPart(), tokenizer=None, modality="text", cache=None).finish(wanted)
    assert isinstance(dataset.inputs, Tokens)
    assert dataset.inputs.lengths.max() == 32


def test_the_model_must_take_what_the_source_holds(tmp_path: Path) -> None:
    path = _write(tmp_path / "data.jsonl", _rows())
    with pytest.raises(DataError, match=r"data\.jsonl holds text data, but the model takes image data"):
        _prepare(_part(path), None, modality="image")
    with pytest.raises(DataError, match="builtin:digits holds image data, but the model takes text data"):
        _prepare(DataPart(source="builtin:digits"), None)
    with pytest.raises(DataError, match="the model comes without a tokenizer"):
        outline(_part(path), TaskPart(), tokenizer=None, modality="text", cache=None)


def test_a_text_without_tokens_is_named(tmp_path: Path) -> None:
    class Bare(Words):
        def get(self, training_texts: Iterable[str]) -> Any:
            from tokenizers import normalizers, processors

            tokenizer = super().get(training_texts)
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
            tokenizer.backend_tokenizer.normalizer = normalizers.Replace("w3 w1 w1 w1 ", "")
            return tokenizer

    with pytest.raises(DataError, match=r"data\.jsonl:4: the tokenizer finds no token(.|\n)*w3"):
        _prepare(_part(_write(tmp_path / "data.jsonl", _rows())), None, Bare())


def _given(**changes: Any) -> Given:
    settled = {"label_names": ("good", "bad"), "kind": "classification", "modality": "text", "max_length": 16}
    return Given(tokenizer=Words().get([]), **settled | changes)


@pytest.mark.parametrize("settings", [{}, {"label": "stars"}])
def test_rows_without_labels_are_for_predict(tmp_path: Path, settings: dict[str, str]) -> None:
    (tmp_path / "new.csv").write_text("text,id\na,1\nb,2\n")
    part = DataPart(source=str(tmp_path / "new.csv"), **settings)
    with pytest.raises(DataError, match=r"no label column found|no column 'stars'") as caught:
        prepare_to_evaluate(part, _given())
    assert caught.value.fix.endswith(f"paceline predict RUN {tmp_path}/new.csv labels rows that have no label")


def test_evaluation_takes_the_models_labels(tmp_path: Path) -> None:
    dataset = prepare_to_evaluate(_part(_write(tmp_path / "new.jsonl", _rows(6))), _given())
    assert dataset.labels.tolist() == [0, 1, 0, 1, 0, 1], "in the model's order, not sorted"
    assert dataset.label_names == ("good", "bad")
    assert {name: ids.tolist() for name, ids in dataset.splits.items()} == {"all": [0, 1, 2, 3, 4, 5]}


def test_evaluation_of_one_class_and_of_one_row_is_possible(tmp_path: Path) -> None:
    dataset = prepare_to_evaluate(_part(_write(tmp_path / "new.jsonl", _rows(6)[::2])), _given())
    assert dataset.labels.tolist() == [0, 0, 0]
    dataset = prepare_to_evaluate(_part(_write(tmp_path / "one.jsonl", _rows(1))), _given())
    assert dataset.labels.tolist() == [0]


def test_evaluation_of_several_splits_says_that_it_is_of_all(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("text,label\nw1,good\nw2,bad\n")
    dataset = prepare_to_evaluate(DataPart(source=str(tmp_path)), _given())
    assert len(dataset.splits["all"]) == 4
    assert any("all of train and test is measured together" in notice for notice in dataset.notices)
    alone = prepare_to_evaluate(DataPart(source=str(tmp_path / "test.csv")), _given())
    assert not any("measured together" in notice for notice in alone.notices)
    for name in ("train/good/1", "train/bad/1", "test/good/1", "test/bad/1"):
        (tmp_path / "folders" / name).parent.mkdir(parents=True)
        (tmp_path / "folders" / f"{name}.txt").write_text(f"w3 {name}")
    dataset = prepare_to_evaluate(DataPart(source=str(tmp_path / "folders"), split=None), _given())
    assert any("all of test and train is read together" in notice for notice in dataset.notices)


def test_evaluation_names_a_label_unknown_to_the_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"new\.jsonl:2, column 'label': label 'bad' is unknown to the model"):
        prepare_to_evaluate(_part(_write(tmp_path / "new.jsonl", _rows(6))), _given(label_names=("good", "evil")))


def _predict(rows: Any, size: int = 10, **changes: Any) -> list[tuple[Dataset, Table]]:
    return list(prepare_to_predict(_part("rows"), _given(**changes), size, rows=rows, tell=lambda notice: None))


def test_lists_of_0_and_1_name_the_models_classes_by_place(tmp_path: Path) -> None:
    rows = [{**row, "label": [1, number % 2]} for number, row in enumerate(_rows(6))]
    file = _write(tmp_path / "new.jsonl", rows)
    given = _given(kind="multi_label")
    with pytest.raises(DataError, match=r"new\.jsonl:1, column 'label': label '0' is unknown") as caught:
        prepare_to_evaluate(_part(file, label="auto"), given)
    names = ",".join(given.label_names)
    assert f"--set 'data.label=[{names}]', if the places of the lists" in str(caught.value)
    dataset = prepare_to_evaluate(_part(file, label=given.label_names), given)
    assert dataset.labels.tolist() == [[1.0, number % 2] for number in range(6)]


def test_rows_with_labels_unknown_to_the_model_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = _rows(6)
    rows[1]["label"], rows[4]["label"] = "new", "newer"
    file = _write(tmp_path / "new.jsonl", rows)
    with pytest.raises(DataError, match=r"new\.jsonl:2, column 'label': label 'new' is unknown to the model"):
        prepare_to_evaluate(_part(file), _given())
    dataset = prepare_to_evaluate(_part(file, on_bad_row="skip", bad_rows_allowed=0.5), _given())
    assert dataset.origins.lines.tolist() == [1, 3, 4, 6]
    assert any("dropped 2 of 6 rows" in notice and "label 'new' is unknown" in notice for notice in dataset.notices)
    with pytest.raises(DataError, match=r"2 of 6 rows .* cannot be used"):
        prepare_to_evaluate(_part(file, on_bad_row="skip"), _given())


def test_prediction_needs_no_labels() -> None:
    rows = [{"text": "w1 w2", "extra": 7}]
    ((dataset, table),) = _predict(rows)
    assert dataset.labels.tolist() == [0]
    assert table.rows is not None
    assert table.rows[0]["extra"] == 7
    ((dataset, _),) = _predict(rows, kind="multi_label")
    assert dataset.labels.tolist() == [[0, 0]]


def test_prediction_is_prepared_a_piece_at_a_time() -> None:
    pieces = _predict([{"text": f"w{n} w2"} for n in range(25)])
    assert [len(dataset) for dataset, _ in pieces] == [10, 10, 5]


def test_images_are_brought_to_what_the_model_takes() -> None:
    grey = [{"text": np.full((20, 20), 7, np.uint8)}]
    ((dataset, _),) = _predict(grey, modality="image", image_shape=(8, 8, 3))
    assert dataset.inputs.pixels.shape == (1, 8, 8, 3)  # type: ignore[union-attr]
    colour = [{"text": np.full((8, 8, 3), 7, np.uint8)}]
    with pytest.raises(DataError, match=r"in colour(.|\n)*8 × 8 pixels, grey"):
        _predict(colour, modality="image", image_shape=(8, 8, 1))
    with pytest.raises(DataError, match=r"8 × 8 pixels(.|\n)*9 × 8 pixels"):
        _predict(colour, modality="image", image_shape=(8, 9, 3))


def test_rows_put_aside_are_so_again_when_the_data_come_out_of_the_cache(tmp_path: Path) -> None:
    rows = _rows()
    rows[3]["text"], rows[9]["label"] = "", ""
    part = _part(_write(tmp_path / "data.jsonl", rows), on_bad_row="skip", bad_rows_allowed=0.1)
    cache, tokenizer = tmp_path / "cache", Words()
    places = [tmp_path / name / "quarantine.jsonl" for name in ("one", "two")]
    found = []
    for place in places:
        place.parent.mkdir()
        found.append(_prepare(part, cache, tokenizer, quarantine=place))
    assert len(tokenizer.offered) == 1, "it was not taken from the cache: nothing is shown"
    assert [json.loads(line)["line"] for line in places[0].read_text().splitlines()] == [4, 10]
    assert places[1].read_bytes() == places[0].read_bytes()
    for dataset, place in zip(found, places, strict=True):
        (notice,) = [notice for notice in dataset.notices if notice.startswith("dropped")]
        assert notice.startswith("dropped 2 of 40 rows (5.00%): ")
        assert notice.endswith(f"; see {place}")
    assert [len(each.notices) for each in found] == [len(found[0].notices)] * 2
    assert _same(*found)
    # a rank that does not write, and who only reads
    (notice,) = [notice for notice in _prepare(part, cache, tokenizer).notices if notice.startswith("dropped")]
    assert "quarantine.jsonl" not in notice, "another run's file is named"


def test_the_source_of_cached_data_is_not_read_where_nothing_can_have_been_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, cache = _part(_write(tmp_path / "data.jsonl", _rows())), tmp_path / "cache"
    _prepare(part, cache)
    monkeypatch.setattr("paceline.data.sources.read", lambda *_, **__: pytest.fail("the source was parsed"))
    _prepare(part, cache, quarantine=tmp_path / "quarantine.jsonl")
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_doubts_about_labels_are_told_once_and_out_of_the_cache_too(tmp_path: Path) -> None:
    rows = [*_rows(), *({"text": f"w4{number} w2", "label": "nan", "id": 0} for number in range(4))]
    part = _part(_write(tmp_path / "a.jsonl", rows))
    first, again = _prepare(part, tmp_path / "cache"), _prepare(part, tmp_path / "cache")
    assert [notice for notice in first.notices if "called like a missing value: 'nan' (4 rows)" in notice]
    assert first.notices == again.notices
    assert len(set(first.notices)) == len(first.notices)
