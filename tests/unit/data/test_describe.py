"""What truncation takes, and how labels are spread, over the training split."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.data.describe import BINS, MOST_LABELS, described, text_lengths

WHOLE = np.array([10, 20, 30, 40, 100])


def dataset(
    inputs: Tokens | Images, labels: np.ndarray, kind: str, names: tuple[str, ...], train: list[int]
) -> Dataset:
    origins = Origins(("x",), np.zeros(len(inputs), np.int32), np.zeros(len(inputs), np.int64))
    splits = {"train": np.array(train)}
    return Dataset(
        inputs=inputs, labels=labels, kind=kind, label_names=names, splits=splits, origins=origins, fingerprint="f"
    )


def tokens(whole: np.ndarray, max_length: int) -> Tokens:
    kept = np.minimum(whole, max_length)
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    return Tokens(np.zeros(int(kept.sum()), np.uint16), offsets, 0, whole=whole)


def test_shares_are_of_texts_and_of_tokens() -> None:
    found = text_lengths(WHOLE, 25)
    assert (found.median, found.p95, found.longest) == (30, 88, 100)
    assert found.cut.texts == 3 / 5
    assert found.cut.tokens == pytest.approx((5 + 15 + 75) / 200)
    assert [(cut.max_length, cut.texts) for cut in found.others] == [(50, 1 / 5), (100, 0)]
    assert found.others[0].tokens == pytest.approx(50 / 200)
    assert len(found.histogram) == BINS
    assert sum(found.histogram) == 5


def test_a_model_takes_no_more_tokens_than_it_has_positions_for() -> None:
    assert [cut.max_length for cut in text_lengths(WHOLE, 25, positions=64).others] == [50, 64]
    assert text_lengths(WHOLE, 25, positions=25).others == ()
    assert text_lengths(WHOLE, 100).others == ()


def test_only_training_samples_count() -> None:
    found = described(
        dataset(tokens(WHOLE, 25), np.array([0, 1, 1, 0, 0]), "classification", ("a", "b"), [0, 1, 2]), 25
    )
    assert found.labels == {"b": 2, "a": 1}
    assert found.lengths is not None
    assert (found.lengths.longest, found.lengths.cut.texts) == (30, 1 / 3)


def test_labels_of_other_tasks() -> None:
    pixels = Images(np.zeros((2, 8, 8, 1), np.uint8))
    found = described(dataset(pixels, np.array([[0, 1], [1, 1]], np.float32), "multi_label", ("a", "b"), [0, 1]), 25)
    assert (found.labels, found.lengths) == ({"b": 2, "a": 1}, None)
    assert described(dataset(pixels, np.zeros(2, np.float32), "regression", ("v",), [0, 1]), 25).labels == {}


def test_of_many_labels_the_most_frequent_are_kept() -> None:
    names = tuple(f"l{number}" for number in range(MOST_LABELS + 5))
    labels = np.array([*range(len(names)), len(names) - 1])
    pixels = Images(np.zeros((len(labels), 8, 8, 1), np.uint8))
    found = described(dataset(pixels, labels, "classification", names, list(range(len(labels)))), 25).labels
    assert len(found) == MOST_LABELS
    assert next(iter(found.items())) == (names[-1], 2)
