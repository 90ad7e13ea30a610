"""What is kept of texts that are too long: the same as tokenizers cut, where they do, and each choice by itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.contract.errors import DataError, RecipeError
from paceline.data.cache import load, save
from paceline.data.dataset import Dataset, Origins, Tokens
from paceline.data.encode import encode_texts
from paceline.data.layout import PackedLayout, PaddedLayout, WindowedLayout
from paceline.data.overflow import Overflow, pieces, pieces_of_pair
from paceline.data.prepare import _cache_key, _require_texts
from paceline.data.table import Table
from paceline.recipe import Recipe
from paceline.recipe.parts import DataPart, TaskPart
from tests.made_tokenizers import bert, funnel

TEXTS = ["the film was fine", "we laughed , we cried ; what an evening " * 3, "dull", "a film </s> we cried " * 4]
PAIRS = ["dull", "bad", "what an evening at the cinema " * 3, "the film was fine " * 5]
WINDOWS = Overflow(kind="windows")


def sequences(tokens: Tokens) -> list[list[int]]:
    return [piece.tolist() for piece in np.split(tokens.flat, tokens.offsets[1:-1])]


def test_head_and_tail_are_split_as_in_the_paper() -> None:
    (kept,) = pieces(1000, 510, Overflow(kind="head+tail"))
    assert kept.tolist() == [*range(128), *range(1000 - 382, 1000)]
    (kept,) = pieces(10, 4, Overflow(kind="head+tail", head=0.5))
    assert kept.tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("kind", ["head", "tail", "head+tail", "windows"])
def test_what_fits_stays_whole(kind: str) -> None:
    assert [piece.tolist() for piece in pieces(5, 5, Overflow(kind=kind))] == [[0, 1, 2, 3, 4]]
    assert [(a.tolist(), b.tolist()) for a, b in pieces_of_pair(2, 3, 5, Overflow(kind=kind))] == [([0, 1], [0, 1, 2])]


@pytest.mark.parametrize("length", [5, 7, 8, 40, 41])
def test_windows_hold_every_token_and_overlap(length: int) -> None:
    found = pieces(length, 4, WINDOWS)
    assert sorted(set(np.concatenate(found).tolist())) == list(range(length))
    assert all(len(np.intersect1d(one, other)) == 1 for one, other in pairwise(found))
    assert {len(piece) for piece in found[:-1]} == {4}
    assert len(pieces(length, 4, Overflow(kind="windows", max_windows=2))) == 2


@pytest.mark.parametrize("max_length", [7, 12])
@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["texts", "pairs"])
@pytest.mark.parametrize("make", [bert, funnel])
def test_the_tail_is_what_a_tokenizer_that_cuts_on_the_left_keeps(
    make: Any, pairs: list[str] | None, max_length: int
) -> None:
    tokens = encode_texts(make(), TEXTS, pairs, max_length, Overflow(kind="tail"))
    cut = make(truncation_side="left")(TEXTS, pairs, truncation=True, max_length=max_length, return_token_type_ids=True)
    assert sequences(tokens) == cut["input_ids"]
    types = [tokens.begins_of_second(False), tokens.types]
    for at, theirs in enumerate(cut["token_type_ids"]):
        if types[1] is not None:
            assert types[1][tokens.offsets[at] : tokens.offsets[at + 1]].tolist() == theirs
        elif types[0] is not None:
            assert int(types[0][at]) == len(theirs) - sum(theirs)
    head = encode_texts(make(truncation_side="left"), TEXTS, pairs, max_length)
    assert np.array_equal(tokens.whole, head.whole)
    assert (tokens.typed, tokens.pad_id, tokens.pad_type) == (head.typed, head.pad_id, head.pad_type)


@pytest.mark.parametrize("overlap", [0, 2, 3])
def test_windows_are_those_of_the_tokenizer(overlap: int) -> None:
    tokenizer = bert()
    tokens = encode_texts(tokenizer, TEXTS, None, 8, Overflow(kind="windows", stride=float(overlap) if overlap else 0))
    settings = {"truncation": True, "max_length": 8, "stride": overlap, "return_overflowing_tokens": True}
    found = tokenizer(TEXTS, **settings)
    assert sequences(tokens) == found["input_ids"]
    assert tokens.windows is not None
    assert np.arange(4).repeat(tokens.num_windows).tolist() == found["overflow_to_sample_mapping"]
    assert tokens.lengths.tolist() == [sum(map(len, piece)) for piece in _by_text(tokens)]


def _by_text(tokens: Tokens) -> list[list[list[int]]]:
    assert tokens.windows is not None
    found = sequences(tokens)
    return [found[a:b] for a, b in zip(tokens.windows[:-1], tokens.windows[1:], strict=True)]


def test_the_longer_text_of_a_pair_has_the_windows_and_the_other_is_in_each() -> None:
    tokenizer = bert()
    tokens = encode_texts(tokenizer, TEXTS, PAIRS, 12, WINDOWS)
    whole = [tokenizer(text, pair)["input_ids"] for text, pair in zip(TEXTS, PAIRS, strict=True)]
    by_text = _by_text(tokens)
    assert by_text[0] == [whole[0]], "it fits"
    end = tokenizer.eos_token_id
    bad = tokenizer("bad", add_special_tokens=False)["input_ids"]
    assert len(by_text[1]) > 2
    assert all(window[-len(bad) - 1 :] == [*bad, end] for window in by_text[1])
    dull = tokenizer("dull", add_special_tokens=False)["input_ids"]
    assert all(window[1 : 1 + len(dull)] == dull for window in by_text[2])
    # both are too long: the shorter has half of the room
    half = (12 - 3) // 2
    second = tokenizer(PAIRS[3], add_special_tokens=False)["input_ids"]
    first = tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]
    shorter = min((first, second), key=len)
    at = slice(1, 1 + half) if shorter is first else slice(-1 - half, -1)
    assert all(window[at] == shorter[:half] for window in by_text[3])
    assert tokens.second is not None
    assert len(tokens.second) == sum(map(len, by_text))


@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["texts", "pairs"])
def test_a_slow_tokenizer_is_cut_alike(pairs: list[str] | None) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokens = encode_texts(tokenizer, TEXTS, pairs, 20, Overflow(kind="head+tail", head=0.5))
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    end, found = tokenizer.eos_token_id, sequences(tokens)
    if pairs is None:
        assert found[1] == [*alone[1][:10], *alone[1][-9:], end]
    else:
        other = tokenizer("bad", add_special_tokens=False)["input_ids"]
        assert found[1] == [*alone[1][:8], *alone[1][-7:], end, *other, end]
    assert tokens.whole is not None
    seconds = pairs or [None] * len(TEXTS)
    assert tokens.whole.tolist() == [len(tokenizer(a, b)["input_ids"]) for a, b in zip(TEXTS, seconds, strict=True)]


def test_windows_that_come_no_further_are_refused() -> None:
    with pytest.raises(DataError, match="no window would come further"):
        encode_texts(bert(), TEXTS, None, 8, Overflow(kind="windows", stride=6))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("data.stride=0.5", "no effect with overflow = head\n  fix: --set data.overflow=windows"),
        ("data.head=0.5", "--set data.overflow=head+tail"),
        ("data.aggregate=max", "--set data.overflow=windows"),
        ("data.overflow=middle", "'head', 'tail', 'head+tail' or 'windows'"),
        ("data.head=1.5", "less than 1"),
        ("data.stride=1.5", "neither a share below 1 nor a whole number"),
    ],
)
def test_what_has_no_effect_or_is_out_of_range_is_refused(setting: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse({"model": {"source": "any"}}).with_settings([setting])
    assert told in str(error.value)


def test_images_and_bare_tokens_are_refused() -> None:
    origins = Origins(("a",), np.zeros(1, np.int32), np.zeros(1, np.int64))
    table = Table(images=np.zeros((1, 8, 8, 3), np.uint8), origins=origins)
    with pytest.raises(DataError, match=r"data\.overflow = tail: no effect"):
        _require_texts(table, DataPart(source="folder"), Overflow(kind="tail"))


def test_every_setting_that_changes_tokens_is_in_the_key_of_the_cache() -> None:
    def key(**settings: Any) -> str:
        return _cache_key("same", DataPart(source="a.csv", **settings), TaskPart(), "tokenizer", "text", ())

    windows = {"overflow": "windows"}
    others = [{}, {"overflow": "tail"}, {"overflow": "head+tail"}, {"overflow": "head+tail", "head": 0.5}, windows]
    others += [{**windows, "stride": 0.5}, {**windows, "max_windows": 3}]
    assert len({key(**settings) for settings in others}) == len(others)
    assert key(**windows, aggregate="max") == key(**windows), "tokens are the same"


def dataset() -> Dataset:
    tokens = encode_texts(bert(), TEXTS, None, 8, WINDOWS)
    return Dataset(
        inputs=tokens,
        labels=np.arange(4),
        kind="classification",
        label_names=("0", "1", "2", "3"),
        splits={"train": np.array([3, 1]), "test": np.array([0, 2])},
        origins=Origins(("a.csv",), np.zeros(4, np.int32), np.arange(2, 6)),
        fingerprint="made",
    )


def test_the_cache_keeps_windows(tmp_path: Path) -> None:
    save(dataset(), tmp_path / "entry")
    found = load(tmp_path / "entry")
    assert found is not None
    assert isinstance(found.inputs, Tokens)
    assert _by_text(found.inputs) == _by_text(dataset().inputs)  # type: ignore[arg-type]


def test_every_window_may_be_a_sample_of_its_own() -> None:
    whole, each = dataset(), dataset().each_window()
    counts = whole.inputs.num_windows  # type: ignore[union-attr]
    assert counts.tolist()[0] == 1 < counts.min(initial=9, where=counts > 1)
    assert each.labels.tolist() == np.arange(4).repeat(counts).tolist()
    assert each.labels[each.splits["train"]].tolist() == [3] * counts[3] + [1] * counts[1]
    assert [each.origins.of(i) for i in each.splits["test"]] == ["a.csv:2", "a.csv:4"]
    assert each.each_window() is each


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_a_batch_has_the_windows_of_its_texts_and_the_texts_labels(packs: bool) -> None:
    whole, device = dataset(), torch.device("cpu")
    each = whole.each_window()
    inner: Any
    if packs:
        inner = PackedLayout(
            each.inputs, each.labels, device, token_types=False, first_position=0, bucket=1, resident=False
        )
    else:
        inner = PaddedLayout(each.inputs, each.labels, device, token_types=False)
    layout = WindowedLayout(inner, whole.inputs, device)  # type: ignore[arg-type]
    batch = layout.collate(np.array([3, 0, 1]))
    counts = whole.inputs.num_windows  # type: ignore[union-attr]
    assert batch.labels.tolist() == [3, 0, 1]
    assert batch.weights.tolist() == [1, 1, 1]
    assert batch.windows is not None
    assert batch.windows.tolist() == [0] * counts[3] + [1] + [2] * counts[1]
    rows = len(batch.packed.sequence) if batch.packed else len(batch.inputs["input_ids"])
    assert rows == len(batch.windows)
    assert layout.size(np.array([3, 0])).samples == 2
    assert layout.collate(np.array([0, 2])).windows is None, "one window each: a batch as any other"
    assert layout.collate(np.array([], dtype=np.int64)).weights.tolist() == [0.0]
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert torch.equal(again.windows, batch.windows)
    assert (again.packed is None) == (batch.packed is None)


def test_batches_of_an_evaluation_are_bounded_by_windows() -> None:
    counts = np.array([1, 1, 30, 2, 3, 1, 4, 1])
    begins = np.concatenate(([0], counts.cumsum()))
    tokens = Tokens(np.zeros(begins[-1], np.uint16), np.arange(begins[-1] + 1), 0, windows=begins)
    inner = PaddedLayout(tokens.each_window(), np.zeros(begins[-1]), torch.device("cpu"), token_types=False)
    found = WindowedLayout(inner, tokens, torch.device("cpu")).batches(np.arange(8), 4)
    assert sorted(np.concatenate(found).tolist()) == list(range(8))
    assert all(counts[ids].sum() <= 4 or len(ids) == 1 for ids in found)
