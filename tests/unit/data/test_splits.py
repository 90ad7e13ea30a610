"""Splitting: exact counts, strata, seeds, copies that stay together, and given splits that stay as they are."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.dataset import Origins, Tokens
from paceline.data.splits import FIRST_CHARACTERS, FIRST_WORDS, Splits, duplicate_keys, split_rows
from paceline.data.table import Table
from paceline.recipe.parts import SplitsPart


def _origins(num_rows: int) -> Origins:
    return Origins(("data.csv",), np.zeros(num_rows, dtype=np.int32), np.arange(num_rows, dtype=np.int64))


def _split(labels: Sequence[object], part: SplitsPart, **options: object) -> Splits:
    keys = options.get("keys", np.arange(len(labels)))
    return split_rows(labels, options.get("kind", "classification"), keys, options.get("given"), part)  # type: ignore[arg-type]


def _sizes(divided: Splits) -> dict[str, int]:
    return {name: len(ids) for name, ids in divided.splits.items()}


def test_counts_are_exact_and_stratified() -> None:
    labels = ["neg", "pos"] * 500
    divided = _split(labels, SplitsPart(train=700, validation=100, test=200))
    assert _sizes(divided) == {"train": 700, "validation": 100, "test": 200}
    for ids in divided.splits.values():
        assert np.mean([labels[row] == "pos" for row in ids]) == 0.5
    assert sorted(np.concatenate(list(divided.splits.values()))) == list(range(1000))


def test_uneven_classes_keep_their_shares() -> None:
    labels = ["rare"] * 50 + ["usual"] * 950
    divided = _split(labels, SplitsPart(validation=0.1, test=0.2))
    assert _sizes(divided) == {"train": 700, "validation": 100, "test": 200}
    assert sum(labels[row] == "rare" for row in divided.splits["test"]) == 10
    assert sum(labels[row] == "rare" for row in divided.splits["validation"]) == 5


@pytest.mark.parametrize("num_rows", [3, 7, 10, 33, 101])
def test_shares_of_one_use_every_row(num_rows: int) -> None:
    divided = _split(["a"] * num_rows, SplitsPart(train=0.8, validation=0.1, test=0.1))
    assert sum(_sizes(divided).values()) == num_rows


def test_the_seed_decides_and_nothing_else() -> None:
    labels = [str(row % 3) for row in range(300)]
    first, again, other = (_split(labels, SplitsPart(seed=seed)).splits for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["test"], other["test"])


def test_rows_over_are_reported() -> None:
    divided = _split(["a", "b"] * 50, SplitsPart(train=50, validation=10, test=10))
    assert _sizes(divided) == {"train": 50, "validation": 10, "test": 10}
    assert any("30 rows belong to no split" in notice for notice in divided.notices)


def test_no_text_is_in_two_splits_and_counts_still_hold() -> None:
    random = np.random.default_rng(3)
    keys = random.integers(0, 700, size=1000)
    labels = [str(row % 2) for row in range(1000)]
    divided = _split(labels, SplitsPart(train=700, validation=100, test=200), keys=keys)
    assert _sizes(divided) == {"train": 700, "validation": 100, "test": 200}
    found = [set(keys[ids]) for ids in divided.splits.values()]
    assert sum(map(len, found)) == len(set.union(*found))


def test_counts_that_copies_prevent_are_reported() -> None:
    keys = np.repeat(np.arange(50), 2)
    divided = _split(["a"] * 100, SplitsPart(validation=11, test=20), keys=keys)
    assert _sizes(divided) == {"train": 70, "validation": 10, "test": 20}
    assert any("validation has 10 rows instead of 11" in notice for notice in divided.notices)


def test_one_stratum_makes_up_for_anothers_copies() -> None:
    keys = np.concatenate([np.repeat(np.arange(25), 2), np.arange(25, 75)])
    divided = _split(["a"] * 50 + ["b"] * 50, SplitsPart(validation=0, test=10), keys=keys)
    assert _sizes(divided) == {"train": 90, "test": 10}


def test_every_class_is_in_train_first() -> None:
    labels = ["usual"] * 96 + ["two", "two", "one", "three"]
    for seed in range(20):
        divided = _split(labels, SplitsPart(validation=0.3, test=0.3, seed=seed))
        assert {labels[row] for row in divided.splits["train"]} == {"usual", "one", "two", "three"}
        assert _sizes(divided) == {"train": 40, "validation": 30, "test": 30}
    assert any("fewer different samples than splits" in notice and "one" in notice for notice in divided.notices)


def test_multi_label_strata_are_combinations_and_every_label_is_in_train() -> None:
    names = [tuple(name for bit, name in enumerate("abcdefg") if row >> bit & 1) for row in range(128)]
    divided = _split(names, SplitsPart(validation=20, test=60), kind="multi_label")
    assert _sizes(divided) == {"train": 48, "validation": 20, "test": 60}, "unique combinations are not kept for train"
    assert {name for row in divided.splits["train"] for name in names[row]} == set("abcdefg")


def test_rare_combinations_share_one_stratum() -> None:
    names: list[tuple[str, ...]] = [(str(row // 18),) for row in range(180)]
    names += list(itertools.combinations("0123456789", 2))[:20]
    divided = _split(names, SplitsPart(validation=0, test=0.1), kind="multi_label")
    assert sum(row >= 180 for row in divided.splits["test"]) == 2
    assert _sizes(divided) == {"train": 180, "test": 20}


def test_ties_between_small_classes_are_broken_at_random() -> None:
    labels = [str(row // 10) for row in range(1000)]
    divided = _split(labels, SplitsPart(validation=0, test=0.05))
    tested = divided.splits["test"] // 10
    assert len(set(tested)) == 50, "half of the classes get one row each"
    assert 10 < np.sum(tested < 50) < 40, "not the first half"


def test_regression_is_stratified_by_quantiles() -> None:
    targets = np.random.default_rng(0).lognormal(size=1000).tolist()
    divided = _split(targets, SplitsPart(validation=0, test=0.2), kind="regression")
    ranks = np.argsort(np.argsort(targets))[divided.splits["test"]]
    assert np.bincount(ranks // 100, minlength=10).tolist() == [20] * 10


def test_given_splits_are_kept() -> None:
    given = ["train", "test", "validation", "train"]
    divided = _split(["a", "b", "a", "b"], SplitsPart(validation=0.5), given=given)
    assert {name: ids.tolist() for name, ids in divided.splits.items()} == {
        "train": [0, 3],
        "validation": [2],
        "test": [1],
    }
    assert divided.notices == ()


def test_missing_validation_is_taken_out_of_train_alone() -> None:
    given = ["train"] * 100 + ["test"] * 20
    labels = ["a", "b"] * 60
    divided = _split(labels, SplitsPart(train=50, validation=0.1, test=0.3), given=given)
    assert _sizes(divided) == {"train": 90, "validation": 10, "test": 20}
    assert list(divided.splits) == ["train", "validation", "test"]
    assert divided.splits["validation"].max() < 100
    assert sum(labels[row] == "a" for row in divided.splits["validation"]) == 5
    assert any("10 rows are taken out of train" in notice for notice in divided.notices)


def test_validation_of_zero_takes_nothing() -> None:
    divided = _split(["a", "b"] * 5, SplitsPart(validation=0), given=["train"] * 8 + ["test"] * 2)
    assert _sizes(divided) == {"train": 8, "test": 2}


def test_texts_shared_by_given_splits_are_counted() -> None:
    keys = np.array([0, 1, 2, 0, 1, 3])
    given = ["train", "train", "train", "test", "test", "test"]
    divided = _split(list("ababab"), SplitsPart(validation=0), given=given, keys=keys)
    assert any("2 of 3 rows of test are also in train" in notice for notice in divided.notices)


@pytest.mark.parametrize(
    ("num_rows", "part", "message"),
    [
        (10, SplitsPart(train=8, validation=2, test=2), "asks for 12 rows"),
        (10, SplitsPart(validation=5, test=5), "no row is left for train"),
        (3, SplitsPart(train=0.1, validation=1, test=1), "no row is left for train"),
    ],
)
def test_impossible_splits(num_rows: int, part: SplitsPart, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _split(["a", "b"] * (num_rows // 2) + ["a"] * (num_rows % 2), part)


def test_one_text_only_leaves_no_row_for_two_splits() -> None:
    divided = _split(["a"] * 10, SplitsPart(validation=2, test=2), keys=np.zeros(10, dtype=np.int64))
    assert _sizes(divided) == {"train": 10}, "copies of one text all belong to train"
    assert any(re.search("test has 0 rows instead of 2", notice) for notice in divided.notices)


def test_given_splits_need_train() -> None:
    with pytest.raises(DataError, match="no row belongs to train"):
        _split(["a", "b"], SplitsPart(), given=["test", "validation"])


def test_texts_are_compared_without_case_and_white_space() -> None:
    texts = ["One  text", "one\ttext ", "onetext", "ONE TEXT"]
    keys = duplicate_keys(Table(texts=texts, origins=_origins(4)))
    assert keys.tolist() == [0, 0, 1, 0]
    keys = duplicate_keys(Table(texts=texts, pairs=["x", "y", "x", " X"], origins=_origins(4)))
    assert keys.tolist() == [0, 1, 2, 0], "both texts of a pair count"
    assert duplicate_keys(Table(texts=["\ud800"], origins=_origins(1))).tolist() == [0], "a lone surrogate is a text"


def test_texts_that_begin_alike_are_compared_to_their_end() -> None:
    """Beginnings of any length, cut in any place, with white space of any width."""
    draw = random.Random(0)
    words = ["a", "ſs", "SS", "ß", "word", "x" * (FIRST_CHARACTERS // FIRST_WORDS + 3)]
    texts = []
    for _ in range(400):
        beginning = [draw.choice(words[:2])] * draw.choice([1, FIRST_WORDS - 1, FIRST_WORDS, FIRST_WORDS + 1, 40])
        spaces = draw.choice([" ", "\n\t", " " * draw.choice([20, FIRST_CHARACTERS])])
        texts.append(spaces.join([*beginning, *draw.choices(words, k=draw.randrange(3))]) + draw.choice(["", " "]))
    plain = [" ".join(text.casefold().split()) for text in texts]
    first: dict[str, int] = {}
    expected = [first.setdefault(text, len(first)) for text in plain]
    assert len(first) < len(texts), "none is there twice"
    assert duplicate_keys(Table(texts=texts, origins=_origins(len(texts)))).tolist() == expected


def test_images_and_tokens_are_compared_by_content() -> None:
    images = np.array([[[[1]]], [[[2]]], [[[1]]]], dtype=np.uint8)
    assert duplicate_keys(Table(images=images, origins=_origins(3))).tolist() == [0, 1, 0]
    tokens = Tokens(flat=np.array([5, 6, 5, 6, 7], dtype=np.uint16), offsets=np.array([0, 2, 4, 5]), pad_id=0)
    assert duplicate_keys(Table(tokens=tokens, origins=_origins(3))).tolist() == [0, 0, 1]


def test_a_share_of_less_than_a_row_is_told() -> None:
    divided = _split(["neg", "pos"] * 2, SplitsPart(validation=0.1, test=0.2))
    assert _sizes(divided) == {"train": 3, "test": 1}
    assert "validation has no rows: data.splits.validation = 0.1 of 4 rows is less than one" in divided.notices
    assert _split(["neg", "pos"] * 2, SplitsPart(validation=0, test=0)).notices == (), "nobody asked for one"
    given = _split(["neg", "pos"] * 2, SplitsPart(validation=0.1), given=["train"] * 4)
    assert not any("0 rows are taken" in notice for notice in given.notices)


def test_many_classes_take_no_square_of_their_number() -> None:
    """Twice as many classes took four times as long: 20,000 took half a minute."""
    labels = [f"c{row % 20_000}" for row in range(60_000)]
    began = time.process_time()
    splits = split_rows(labels, "classification", np.arange(60_000), None, SplitsPart()).splits
    assert time.process_time() - began < 8
    assert len({labels[row] for row in splits["train"]}) == 20_000
