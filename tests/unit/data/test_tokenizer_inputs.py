"""A padded batch is what a call of the tokenizer gives: ids, side and id of the filling, mask, token types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import cache
from paceline.data.dataset import Dataset, Origins, Tokens
from paceline.data.encode import encode_texts
from paceline.data.layout import PackedLayout, PaddedLayout
from tests.made_tokenizers import ALL, PAIRS, TEXTS, bert, funnel, gpt2, roberta, xlnet

CPU = torch.device("cpu")

KINDS = {
    "xlnet": xlnet,
    "xlnet with types": lambda: xlnet(model_input_names=ALL),
    "gpt2": gpt2,
    "gpt2 from the left": lambda: gpt2(padding_side="left"),
    "roberta": roberta,
    "bert": bert,
    "bert from the left": lambda: bert(padding_side="left"),
    "funnel": funnel,
}


def layout_of(tokens: Tokens, **settings: Any) -> PaddedLayout:
    return PaddedLayout(tokens, np.arange(len(tokens)), CPU, **{"token_types": True, "all_types": True} | settings)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["single", "pairs"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_a_call_of_the_tokenizer(kind: str, pairs: list[str] | None, resident: bool) -> None:
    tokenizer = KINDS[kind]()
    tokens = encode_texts(tokenizer, TEXTS, pairs, 24)
    layout = layout_of(tokens, resident=resident)
    for ids in ([0, 1, 2, 3, 4], [1, 4], [0, 3]):
        chosen = [[t[i] for i in ids] if t is not None else None for t in (TEXTS, pairs)]
        expected = tokenizer(*chosen, padding=True, truncation=True, max_length=24, return_tensors="pt")
        found = layout.collate(np.array(ids)).inputs
        assert found.keys() == expected.keys(), "no input more and none less"
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("kind", ["xlnet", "bert from the left"])
def test_filling_stands_left_in_a_batch_that_is_made_wider(kind: str) -> None:
    layout = layout_of(encode_texts(KINDS[kind](), TEXTS, None, 24), resident=True)
    plain, wide = (layout.collate(np.array([0, 1]), slots=slots).inputs for slots in (None, 40))
    narrow = plain["input_ids"].shape[1]
    assert wide["input_ids"].shape == (2, 20)
    for name, values in plain.items():
        assert torch.equal(wide[name][:, -narrow:], values), name
    assert not wide["attention_mask"][:, :-narrow].any()


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("kind", ["xlnet with types", "funnel"])
def test_a_packed_row_has_the_tokenizers_types(kind: str, resident: bool) -> None:
    tokenizer = KINDS[kind]()
    tokens = encode_texts(tokenizer, TEXTS, PAIRS, 24)
    layout = PackedLayout(tokens, np.arange(5), CPU, token_types=True, first_position=0, bucket=8, resident=resident)
    batch = layout.collate(np.arange(5))
    assert batch.packed is not None
    pieces = batch.inputs["token_type_ids"][0].tensor_split(batch.packed.cu_seqlens[1:-1].long())
    for sample, place in enumerate(batch.packed.sequence.tolist()):
        types = tokenizer(TEXTS[sample], PAIRS[sample], truncation=True, max_length=24)["token_type_ids"]
        assert pieces[place].tolist() == types


@pytest.mark.parametrize("resident", [False, True])
def test_positions_of_a_packed_row_skip_a_pad_token_in_a_text(resident: bool) -> None:
    """As transformers' create_position_ids_from_input_ids: RoBERTa counts only what is no pad token."""
    tokens = encode_texts(roberta(), TEXTS, None, 24)
    assert (tokens.flat == 1).sum() == 1
    layout = PackedLayout(tokens, np.arange(5), CPU, token_types=False, first_position=2, bucket=8, resident=resident)
    batch = layout.collate(np.arange(5))
    assert batch.packed is not None
    cuts = batch.packed.cu_seqlens[1:-1].long()
    ids, positions = (batch.inputs[name][0].tensor_split(cuts) for name in ("input_ids", "position_ids"))
    for place in batch.packed.sequence.tolist():
        real = ids[place] != 1
        assert torch.equal(positions[place], torch.cumsum(real, 0) * real + 1)


def test_what_the_tokenizer_gives_comes_back_from_the_cache(tmp_path: Any) -> None:
    tokens = encode_texts(xlnet(model_input_names=ALL), TEXTS, PAIRS, 24)
    count = len(TEXTS)
    dataset = Dataset(
        inputs=tokens,
        labels=np.zeros(count, np.int64),
        kind="classification",
        label_names=("a",),
        splits={"train": np.arange(count)},
        origins=Origins(("f",), np.zeros(count, np.int32), np.zeros(count, np.int64)),
        fingerprint="x",
    )
    cache.save(dataset, tmp_path / "entry")
    loaded = cache.load(tmp_path / "entry")
    assert loaded is not None
    assert isinstance(loaded.inputs, Tokens)
    before, after = (layout_of(t).collate(np.arange(count)).inputs for t in (tokens, loaded.inputs))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.inputs.specials == tokens.specials != ()
    assert loaded.inputs.pairs


def test_a_side_of_the_filling_is_part_of_the_fingerprint() -> None:
    left, right = (encode_texts(bert(padding_side=side), TEXTS, None, 24) for side in ("left", "right"))
    given = (np.zeros(5, np.int64), "classification", ("a",), {"train": np.arange(5)})
    assert cache.dataset_fingerprint(left, *given) != cache.dataset_fingerprint(right, *given)
