"""Tokens are the tokenizer's own, become text again, and what is cut is told."""

from __future__ import annotations

import unicodedata
from typing import Any

from paceline.check.claim import Broken
from paceline.check.subject import Subject
from paceline.check.texts import texts_of
from paceline.models.tokenizers import cutting_on


def check(subject: Subject) -> str:
    """Tokens beside a plain call of the tokenizer; letters that come back; lengths before and after the cut."""
    texts, pairs = texts_of(subject)
    tokens, tokenizer = subject.require_texts(), subject.prepared.tokenizer
    part = subject.recipe.data
    side = "left" if part.overflow == "tail" else "right"
    back = unknown = cut = 0
    ids = sorted({int(sample) for found in subject.dataset.splits.values() for sample in found})
    for sample in ids:
        given = (texts[sample],) if pairs is None else (texts[sample], pairs[sample])
        whole = tokenizer(*given, truncation=False, verbose=False)["input_ids"]
        with cutting_on(tokenizer, side):
            own = tokenizer(*given, truncation=True, max_length=part.max_length)["input_ids"]
        first = sample if tokens.windows is None else int(tokens.windows[sample])
        kept = tokens.flat[tokens.offsets[first] : tokens.offsets[first + 1]].tolist()
        if part.overflow in ("head", "tail") or len(whole) <= part.max_length:
            _same(sample, kept, own)
        told = int(tokens.lengths[sample] if tokens.whole is None else tokens.whole[sample])
        if tokens.windows is None and told != len(whole):
            raise Broken(f"sample {sample} has {len(whole)} tokens, and {told} are told", tensor=f"sample {sample}")
        cut += len(whole) > part.max_length
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in own:
            unknown += 1
        elif pairs is None and len(whole) <= part.max_length:
            back += _comes_back(sample, tokenizer, own, texts[sample])
    lost = f"{cut} of {len(ids)} are cut at {part.max_length} tokens (data.max_length)" if cut else "none is cut"
    strange = f"; {unknown} have tokens that the vocabulary lacks" if unknown else ""
    return f"{len(ids)} texts have the tokenizer's own tokens, {back} become text again; {lost}{strange}"


def _same(sample: int, kept: list[int], own: list[int]) -> None:
    if kept == own:
        return
    at = next((at for at, (one, other) in enumerate(zip(kept, own, strict=False)) if one != other), len(kept))
    told = f"sample {sample} has {len(kept)} tokens, the tokenizer gives {len(own)}; they differ from token {at} on"
    raise Broken(told, tensor=f"token {at} of sample {sample}")


def _comes_back(sample: int, tokenizer: Any, ids: list[int], text: str) -> bool:
    """Whether the letters and digits of a text are those of its tokens, but for case and marks.

    Raises:
        Broken: some are lost, and no token says so.
    """
    found = letters(tokenizer.decode(ids, skip_special_tokens=True))
    expected = letters(text)
    if expected and not found:
        raise Broken(f"nothing of the text of sample {sample} is in its tokens", tensor=f"sample {sample}")
    return found == expected


def letters(text: str) -> str:
    """Letters and digits, without case and marks."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in decomposed if letter.isalnum())
