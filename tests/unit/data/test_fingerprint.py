"""A data set's digest: equal for equal samples, labels and splits alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.data.cache import dataset_fingerprint
from paceline.data.dataset import Images, Tokens

TOKENS = Tokens(np.array([5, 6, 7, 8, 9], dtype=np.uint16), np.array([0, 2, 5]), pad_id=0)
PLAIN: dict[str, Any] = {
    "inputs": TOKENS,
    "labels": np.array([0, 1]),
    "kind": "classification",
    "label_names": ("no", "yes"),
    "splits": {"train": np.array([0]), "test": np.array([1])},
}
OTHERS: dict[str, dict[str, Any]] = {
    "a token": {"inputs": replace(TOKENS, flat=np.array([5, 6, 7, 8, 4], dtype=np.uint16))},
    "where a text ends": {"inputs": replace(TOKENS, offsets=np.array([0, 3, 5]))},
    "token types": {"inputs": replace(TOKENS, second=np.array([1, 2], dtype=np.int32))},
    "the side of the filling": {"inputs": replace(TOKENS, pad_left=True)},
    "a label": {"labels": np.array([1, 1])},
    "the labels' format": {"labels": np.array([0.0, 1.0])},
    "the task": {"kind": "regression"},
    "a label's name": {"label_names": ("no", "maybe")},
    "a split's samples": {"splits": {"train": np.array([1]), "test": np.array([0])}},
    "a split's name": {"splits": {"train": np.array([0]), "validation": np.array([1])}},
    "images": {"inputs": Images(np.zeros((2, 1, 1, 1), dtype=np.uint8))},
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_follows_whatever_a_model_learns_from(name: str) -> None:
    plain = dataset_fingerprint(**PLAIN)
    assert dataset_fingerprint(**PLAIN) == plain
    assert dataset_fingerprint(**{**PLAIN, **OTHERS[name]}) != plain, f"{name} may change unseen"


def test_how_long_a_text_was_before_it_was_cut_is_no_part_of_it() -> None:
    cut = replace(TOKENS, whole=np.array([2, 30]))
    assert dataset_fingerprint(**{**PLAIN, "inputs": cut}) == dataset_fingerprint(**PLAIN)
