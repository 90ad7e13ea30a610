"""Padded batches: what the tokenizer's own padding gives, in few shapes where that is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.dataset import Tokens
from paceline.data.layout import PaddedLayout

CPU = torch.device("cpu")
PAD = 9
LENGTHS = [5, 1, 12, 7, 19, 3, 30, 30, 2, 16]


def tokens_of(pairs: bool) -> Tokens:
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    second = generator.integers(0, np.array(LENGTHS) + 1).astype(np.int32) if pairs else None
    return Tokens(generator.integers(10, 60_000, offsets[-1]).astype(np.uint16), offsets, PAD, second)


def layout_of(tokens: Tokens, **settings: Any) -> PaddedLayout:
    return PaddedLayout(tokens, np.arange(len(LENGTHS)), CPU, **{"token_types": True} | settings)


def by_hand(tokens: Tokens, ids: list[int], width: int) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": []}
    for sample in ids:
        text = tokens.flat[tokens.offsets[sample] : tokens.offsets[sample + 1]].tolist()
        blank = width - len(text)
        found["input_ids"].append(text + [PAD] * blank)
        found["attention_mask"].append([1] * len(text) + [0] * blank)
        if tokens.second is not None:
            begins = tokens.second[sample]
            found.setdefault("token_type_ids", []).append([0] * begins + [1] * (len(text) - begins) + [0] * blank)
    return found


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize(
    ("bucket", "ids", "width"),
    [
        (1, [0, 2, 5], 12),
        (8, [0, 2, 5], 16),
        (8, [9, 1], 16),
        (8, [8], 8),
        (8, [6, 0], 30),  # 32 would be longer than any sample, and maybe than the model's positions
        (64, [1], 30),
    ],
)
def test_equals_padding_by_hand(resident: bool, pairs: bool, bucket: int, ids: list[int], width: int) -> None:
    tokens = tokens_of(pairs)
    layout = layout_of(tokens, bucket=bucket, resident=resident)
    batch = layout.collate(np.array(ids))
    assert {name: tensor.tolist() for name, tensor in batch.inputs.items()} == by_hand(tokens, ids, width)
    assert {tensor.dtype for tensor in batch.inputs.values()} == {torch.int64}
    assert batch.labels.tolist() == ids
    assert batch.weights.tolist() == [1.0] * len(ids)
    assert batch.packed is None
    size = layout.size(np.array(ids))
    assert (size.samples, size.tokens, size.slots) == (len(ids), sum(LENGTHS[i] for i in ids), width * len(ids))


def test_token_types_only_where_the_model_takes_them() -> None:
    assert "token_type_ids" not in layout_of(tokens_of(True), token_types=False).collate(np.array([0])).inputs


def test_the_default_bucket_pads_to_the_longest_of_the_batch() -> None:
    layout = PaddedLayout(tokens_of(False), np.arange(len(LENGTHS)), CPU, token_types=False)
    assert layout.collate(np.array([3, 0])).inputs["input_ids"].shape == (2, 7)


def test_the_layout_of_other_samples_has_the_same_settings() -> None:
    others = tokens_of(True)
    fewer = Tokens(np.arange(10, 14, dtype=np.uint16), np.array([0, 4]), PAD, np.zeros(1, dtype=np.int32))
    made = PaddedLayout(fewer, np.arange(1), CPU, token_types=True, bucket=8, resident=True).over(others, np.arange(10))
    found = made.collate(np.array([0, 2])).inputs
    assert {name: tensor.tolist() for name, tensor in found.items()} == by_hand(others, [0, 2], 16)


def test_evaluation_goes_from_long_to_short() -> None:
    ordered = layout_of(tokens_of(False)).sorted(np.arange(10))
    assert [LENGTHS[sample] for sample in ordered] == sorted(LENGTHS, reverse=True)


@pytest.mark.parametrize("resident", [False, True])
def test_texts_of_one_length_have_no_mask_where_the_model_does_without(resident: bool) -> None:
    equal = Tokens(np.arange(10, 22, dtype=np.uint16), np.array([0, 4, 8, 12]), PAD)
    labels, settings = np.arange(3), {"token_types": False, "bucket": 8, "resident": resident}
    found = PaddedLayout(equal, labels, CPU, **settings, masked=False)
    assert found.collate(np.array([1])).inputs.keys() == {"input_ids"}
    assert "attention_mask" in PaddedLayout(equal, labels, CPU, **settings).collate(np.array([1])).inputs
    ragged = Tokens(np.arange(10, 22, dtype=np.uint16), np.array([0, 4, 9, 12]), PAD)
    assert "attention_mask" in found.over(ragged, labels).collate(np.array([0])).inputs, "others may differ in length"
