"""Encoding equals a call of the tokenizer, whatever the tokenizer, and leaves it as it was."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import DataError, ModelError
from paceline.data import encode
from paceline.data.dataset import Tokens
from paceline.data.encode import encode_texts, truncate
from paceline.data.overflow import HEAD, Overflow

WORDS = """
the quick brown fox jumps over a lazy dog and then some more words are said un ##known ##ly , . !
""".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "The quick brown fox jumps over a lazy dog.",
    "unknownly words, and then some more",
    "dog",
    "the " * 50,
    "Émigré [SEP] zzz!",
    "a a a , a",
]
PAIRS = ["and then", "the lazy dog " * 20, "some more words are said", "a", "unknown fox", "dog"]


def _fast(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    second = options.pop("second", "$B:1 [SEP]:1")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] {second}", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        | {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        | options,
    )


def _samples(tokens: Tokens) -> list[list[int]]:
    return [piece.tolist() for piece in np.split(tokens.flat, tokens.offsets[1:-1])]


def _called(tokenizer: Any, pairs: list[str] | None, max_length: int) -> list[list[int]]:
    """Of a call that keeps the beginning."""
    tokenizer.truncation_side = "right"
    seconds: list[str | None] = [None] * len(TEXTS) if pairs is None else list(pairs)
    return [
        tokenizer(text, pair, truncation=True, max_length=max_length)["input_ids"]
        for text, pair in zip(TEXTS, seconds, strict=True)
    ]


@pytest.mark.parametrize("max_length", [4, 7, 12, 512])
@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["texts", "pairs"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_equals_a_call_of_the_tokenizer_that_keeps_the_beginning(
    pairs: list[str] | None, max_length: int, side: str
) -> None:
    if pairs and max_length == 4:
        max_length = 5
    tokenizer = _fast(truncation_side=side)
    tokens = encode_texts(tokenizer, TEXTS, pairs, max_length)
    assert tokenizer.truncation_side == side, "the tokenizer is handed back as it was"
    assert _samples(tokens) == _called(tokenizer, pairs, max_length)
    assert tokens.flat.dtype == np.uint16
    assert (tokens.second is None) == (pairs is None)


@pytest.mark.parametrize("max_length", [5, 7, 12, 512])
@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["texts", "pairs"])
@pytest.mark.parametrize("kind", ["left", "right", "slow"])
def test_lengths_before_truncation_are_known(pairs: list[str] | None, max_length: int, kind: str) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer() if kind == "slow" else _fast(truncation_side=kind)
    seconds = pairs or [None] * len(TEXTS)
    whole = [len(tokenizer(text, pair)["input_ids"]) for text, pair in zip(TEXTS, seconds, strict=True)]
    tokens = encode_texts(tokenizer, TEXTS, pairs, max_length)
    if max(whole) <= max_length:
        assert tokens.whole is None
    else:
        assert tokens.whole is not None
        assert tokens.whole.tolist() == whole
    assert tokens.lengths.tolist() == [min(length, max_length) for length in whole]


def test_lengths_are_known_where_the_tokenizer_keeps_little_of_what_it_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokenizers 0.23.1 and 0.23.2 do."""
    told = encode._lost
    monkeypatch.setattr(encode, "_lost", lambda *given: min(told(*given), 2))
    tokenizer = _fast()
    tokens = encode_texts(tokenizer, TEXTS, None, 5)
    assert tokens.whole is not None
    assert tokens.whole.tolist() == [len(tokenizer(text)["input_ids"]) for text in TEXTS]


def test_second_is_where_token_type_one_begins() -> None:
    tokenizer = _fast()
    tokens = encode_texts(tokenizer, TEXTS, PAIRS, 16)
    assert tokens.second is not None
    for sample, (text, pair) in enumerate(zip(TEXTS, PAIRS, strict=True)):
        types = tokenizer(text, pair, truncation=True, max_length=16, return_token_type_ids=True)["token_type_ids"]
        begins, length = tokens.second[sample], tokens.lengths[sample]
        assert [0] * begins + [1] * (length - begins) == types, f"sample {sample}"


def test_pairs_without_token_types() -> None:
    tokens = encode_texts(_fast(second="$B [SEP]"), TEXTS, PAIRS, 16)
    assert tokens.second is not None
    assert tokens.second.tolist() == tokens.lengths.tolist(), "no token is of type 1"


def test_pairs_with_other_token_types_keep_every_one() -> None:
    tokenizer = _fast(second="$B:1 [SEP]:2")
    tokens = encode_texts(tokenizer, TEXTS, PAIRS, 16)
    assert tokens.second is None
    assert tokens.types is not None
    expected = tokenizer(TEXTS, PAIRS, truncation=True, max_length=16)["token_type_ids"]
    assert [piece.tolist() for piece in np.split(tokens.types, tokens.offsets[1:-1])] == expected


def test_a_tokenizer_that_names_no_token_types_gives_none_to_pairs() -> None:
    tokens = encode_texts(_fast(model_input_names=["input_ids", "attention_mask"]), TEXTS, PAIRS, 16)
    assert tokens.pairs
    assert (tokens.second, tokens.types) == (None, None)


def test_special_tokens_in_a_text_follow_the_tokenizers_setting() -> None:
    whole, split = (encode_texts(_fast(split_special_tokens=setting), TEXTS, None, 64) for setting in (False, True))
    assert _samples(split) == _called(_fast(split_special_tokens=True), None, 64)
    assert _samples(whole)[4] != _samples(split)[4]


def test_chunks_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_texts(_fast(), TEXTS, PAIRS, 16)
    monkeypatch.setattr("paceline.data.encode._CHUNK", 4)
    chunked = encode_texts(_fast(), TEXTS, PAIRS, 16)
    assert _samples(chunked) == _samples(whole)
    assert chunked.second is not None
    assert np.array_equal(chunked.second, whole.second)  # type: ignore[arg-type]


def test_the_tokenizer_and_the_environment_are_left_as_they_were() -> None:
    tokenizer = _fast()
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(9, stride=2, strategy="only_first", direction="left")
    backend.enable_padding(length=11, pad_id=4, pad_token="[MASK]")
    before = (backend.truncation, backend.padding, dict(os.environ))
    backend.encode_special_tokens = True
    tokens = encode_texts(tokenizer, TEXTS, None, 16)
    assert (backend.truncation, backend.padding, dict(os.environ)) == before
    assert backend.encode_special_tokens
    assert _samples(tokens) == _called(_fast(), None, 16), "what was set before has no effect"
    backend.no_truncation()
    backend.no_padding()
    encode_texts(tokenizer, TEXTS, None, 16)
    assert (backend.truncation, backend.padding) == (None, None)


def test_a_vocabulary_above_65536_takes_four_bytes() -> None:
    tokenizer = _fast()
    tokenizer.add_tokens([f"extra{number}" for number in range(2**16)])
    tokens = encode_texts(tokenizer, ["extra65535 the", "dog"], None, 16)
    assert tokens.flat.dtype == np.uint32
    assert tokens.flat.max() == len(tokenizer) - 1 > 2**16


@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["texts", "pairs"])
def test_a_slow_tokenizer_works_too(pairs: list[str] | None) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokens = encode_texts(tokenizer, TEXTS, pairs, 20)
    assert _samples(tokens) == _called(tokenizer, pairs, 20)


def test_a_tokenizer_without_padding_pads_with_its_end() -> None:
    tokenizer = _fast(pad_token=None, eos_token="[SEP]")
    assert encode_texts(tokenizer, TEXTS, None, 16).pad_id == 3
    assert encode_texts(_fast(pad_token=None), TEXTS, None, 16).pad_id == 0


@pytest.mark.parametrize(("pairs", "least"), [(None, 3), (PAIRS, 5)], ids=["texts", "pairs"])
def test_a_length_without_room_for_text(pairs: list[str] | None, least: int) -> None:
    with pytest.raises(DataError, match=rf"data.max_length = {least - 1}: no room(.|\n)*={least} at the very least"):
        encode_texts(_fast(), TEXTS, pairs, least - 1)


def test_truncating_tokens() -> None:
    flat = np.arange(9, dtype=np.uint16)
    tokens = Tokens(flat=flat, offsets=np.array([0, 2, 7, 9]), pad_id=0, second=np.array([1, 4, 2], dtype=np.int32))
    short = truncate(tokens, 3)
    assert _samples(short) == [[0, 1], [2, 3, 4], [7, 8]]
    assert short.second is not None
    assert short.second.tolist() == [1, 3, 2]
    assert truncate(tokens, 5) is tokens


@pytest.mark.parametrize("overflow", [HEAD, Overflow(kind="tail")])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_tokenizer_that_panics_is_named(overflow: Overflow, is_long: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Rust's panic is no Exception in Python: it passed every handler, and ended the command as a bug of its own."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = _fast(name_or_path="the/model")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+a+)+b"), "isolated")
    with pytest.raises(ModelError, match="the tokenizer the/model: cannot encode a text") as error:
        encode_texts(tokenizer, ["a dog", "a" * 40 + " dog" * 100_000 * is_long], None, 16, overflow)
    assert "retry-limit" in error.value.why
    assert "panicked" in capfd.readouterr().err
