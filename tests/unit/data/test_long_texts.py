"""Texts far longer than what is kept: the same tokens as whole, and memory that does not follow their length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from paceline.data import encode, long_texts
from paceline.data.encode import encode_texts
from paceline.data.long_texts import head_of

WORDS = """
the quick brown fox's jumps over a lazy-dog, and then: some more words! are said. Émigré 12,345 (so) [MASK] unknownly
这家店的服务非常好 下次还会再来。真的吗？ naïve   co-operate don't
""".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def text_of(characters: int, seed: int = 0, between: str = " ") -> str:
    draw = random.Random(seed)
    words, length = list[str](), 0
    while length < characters:
        words.append(draw.choice(WORDS) + draw.choice(("", "", "", "\n", "  ")))
        length += len(words[-1]) + len(between)
    return between.join(words)


def wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return _trained(backend, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _trained(backend, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))


def byte_level_with_a_blank_in_front() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _trained(backend, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return _trained(backend, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="[UNK]"))


def unigram_of_whole_texts() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return _trained(backend, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="[UNK]"))


def without_words() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(backend, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL))


def _trained(backend: Tokenizer, trainer: Any) -> Tokenizer:
    backend.train_from_iterator([text_of(3000, seed) for seed in range(5)], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


SPLITTING: list[Callable[[], Tokenizer]] = [wordpiece, byte_level, byte_level_with_a_blank_in_front, unigram]
WHOLE: list[Callable[[], Tokenizer]] = [unigram_of_whole_texts, without_words]
LONG = [text_of(9000), "short", text_of(20_000, 1), text_of(6000, 2, between=""), "这家店非常好" * 2000, "a" * 9000]


def around(backend: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (long_texts, encode):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 2000)


@pytest.mark.parametrize("build", [*SPLITTING, *WHOLE])
@pytest.mark.parametrize(
    ("max_length", "pairs"),
    # of pairs, tokenizers keep every combination of what they cut off: 20 GB of these texts where 8 tokens are kept
    [(8, None), (100, None), (100, [text[:3000] for text in LONG[::-1]])],
    ids=["texts of 8", "texts of 100", "pairs of 100"],
)
def test_the_tokens_and_their_number_are_those_of_the_whole_text(
    build: Callable[[], Tokenizer], max_length: int, pairs: list[str] | None
) -> None:
    tokenizer = around(build())
    tokens = encode_texts(tokenizer, LONG, pairs, max_length)
    kept = [piece.tolist() for piece in np.split(tokens.flat, tokens.offsets[1:-1])]
    expected = tokenizer(LONG, pairs, truncation=True, max_length=max_length)["input_ids"]
    assert kept == expected
    assert tokens.whole is not None
    assert tokens.whole.tolist() == [len(ids) for ids in tokenizer(LONG, pairs, verbose=False)["input_ids"]]


@pytest.mark.parametrize("build", SPLITTING)
def test_only_the_beginning_is_encoded_together(build: Callable[[], Tokenizer]) -> None:
    for text in (LONG[0], LONG[2]):
        head, beyond = head_of(build(), text, 8)
        assert text.startswith(head)
        assert 1000 < len(head) <= 2000
        assert beyond > 0


@pytest.mark.parametrize("build", WHOLE)
def test_a_text_whose_end_may_change_its_beginning_is_left_whole(build: Callable[[], Tokenizer]) -> None:
    text = LONG[0].replace("[MASK]", "")  # a special token ends a word for every tokenizer
    assert head_of(build(), text, 8) == (text, 0)


def test_a_beginning_with_too_few_tokens_is_no_beginning() -> None:
    text = " " * 5000 + LONG[0]
    assert head_of(wordpiece(), text, 8) == (text, 0)


def test_long_texts_are_not_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_CHUNK_CHARACTERS", 100)
    texts = ["a" * length for length in (10, 200, 50, 40, 20, 90, 5, 5)]
    chunks = [list(map(len, chunk)) for chunk, _ in encode._chunks(texts, None)]
    assert chunks == [[10], [200], [50, 40], [20], [90, 5, 5]]
    assert encode._chunks([], None) == []
