"""Texts of which far more is read than kept: cut into pieces that have the same tokens alone as in the text.

A tokenizer takes some hundred bytes of memory for a character. The pieces bound that, whatever the length of a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

PIECE_CHARACTERS = 100_000
"""Characters of a piece; a text of up to two of them is left whole."""

_NEAR = 200
"""Characters on each side of a cut that are compared; the context by which tokenizers split words is far smaller."""

_TRIED = 20
"""Places near the end of a piece at which a cut is tried."""

_PLACE = re.compile(r"\s|(?<=[^\w\s])")


def head_of(backend: Any, text: str, max_length: int) -> tuple[str, int]:
    """Return a text's beginning whose first ``max_length`` tokens are the text's, and the tokens behind it.

    The whole text, and 0, where it is short enough, or where its tokenizer splits it into no words: then any character
    may change any token.

    Args:
        backend: of tokenizers, which cuts nothing.
        text: may be of any length.
        max_length: tokens that are kept of it.
    """
    size = max(PIECE_CHARACTERS, 16 * max_length)
    if len(text) <= 2 * size:
        return text, 0
    pieces = _pieces(backend, text, size)
    head = next(pieces)
    if len(head) == len(text) or len(_ids(backend, head)) < max_length:
        return text, 0
    return head, sum(len(_ids(backend, piece)) for piece in pieces)


def _pieces(backend: Any, text: str, size: int) -> Iterator[str]:
    """The text in pieces of about ``size`` characters, as far as there are places to cut it at."""
    start = 0
    while len(text) - start > size:
        end = _place(backend, text, start + size)
        if end is None:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _place(backend: Any, text: str, end: int) -> int | None:
    """The last place before ``end`` where a word ends, and both sides have the tokens that they have together."""
    begin = end - 5 * _NEAR
    places = [match.start() for match in _PLACE.finditer(text, begin, end)]
    for place in places[: -_TRIED - 1 : -1]:
        before, after = text[place - _NEAR : place], text[place : place + _NEAR]
        both = backend.encode(before + after, add_special_tokens=False)
        first = next((at for at, (start, _) in enumerate(both.offsets) if start >= len(before)), 0)
        ends_word = first > 0 and both.word_ids[first - 1] != both.word_ids[first]
        if ends_word and both.ids == [*_ids(backend, before), *_ids(backend, after)]:
            return place
    return None


def _ids(backend: Any, text: str) -> list[int]:
    [one] = backend.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = one.ids
    return ids
