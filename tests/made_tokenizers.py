"""Tokenizers of several families, of a few words each."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

TEXTS = ["the film was fine", "dull", "we laughed , we cried ; what an evening " * 3, "bad <pad> sound </s>", "a film"]
PAIRS = ["dull", "what an evening at the cinema", "bad", "the film", "we cried " * 12]
WORDS = sorted({word for text in (*TEXTS, *PAIRS) for word in text.split() if "<" not in word} | {"at", "cinema"})
ALL = ["input_ids", "token_type_ids", "attention_mask"]


def xlnet(**options: Any) -> Any:
    from transformers import XLNetTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    vocab = [(piece, 0.0) for piece in special] + [(f"▁{word}", -5.0) for word in WORDS]
    return XLNetTokenizerFast(vocab=vocab, unk_id=0, **options)


def gpt2(**options: Any) -> Any:
    from transformers import GPT2TokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "<|endoftext|>"])}
    tokenizer = GPT2TokenizerFast(vocab=vocab, merges=[], **options)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def roberta(**options: Any) -> Any:
    return word_level(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", model_input_names=["input_ids", "attention_mask"], **options
    )


def bert(**options: Any) -> Any:
    return word_level("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", model_input_names=ALL, **options)


def funnel(**options: Any) -> Any:
    return word_level("<s>:2 $A </s>", "<s>:2 $A </s> $B:1 </s>:1", model_input_names=ALL, **options)


def word_level(single: str, pair: str, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    names = dict(zip(("cls_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **options)
