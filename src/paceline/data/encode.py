"""Texts to token ids: in parallel, and straight into one flat array."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError, ModelError, first_line
from paceline.contract.panics import is_panic
from paceline.data.dataset import Tokens
from paceline.data.long_texts import PIECE_CHARACTERS, head_of
from paceline.data.overflow import HEAD, Overflow, overlapping, pieces, pieces_of_pair

_CHUNK, _CHUNK_CHARACTERS = 1000, 2_000_000
"""Texts given to the tokenizer at once: enough to keep its threads busy, few enough to stay small in memory."""


KeepGoing = Callable[[], None]
"""Called between pieces of work that take a while; raises where the work is no longer wanted."""


def wanted() -> None:
    """Keep going, come what may."""


def encode_texts(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    overflow: Overflow = HEAD,
    *,
    keep_going: KeepGoing = wanted,
) -> Tokens:
    """Tokens of every text, equal to ``tokenizer(text, pair, truncation=True, max_length=max_length)``.

    That keeps the beginning, whatever the tokenizer's ``truncation_side`` says. With another ``overflow`` the text is
    encoded whole and cut here; special tokens stand where they do in a text that fits.

    Token types are kept where the tokenizer names them among its ``model_input_names``, and the side, id and type of
    its filling: so that a padded batch is what ``tokenizer(texts, pairs, padding=True, ...)`` gives.

    Fast tokenizers run on their own threads, as many as the environment allows (``TOKENIZERS_PARALLELISM`` and
    ``RAYON_NUM_THREADS`` are left as they are). The tokenizer is handed back with the truncation and padding it had.

    Args:
        tokenizer: of transformers, fast or slow.
        texts: [n] texts, or first texts of pairs.
        pairs: [n] second texts, or None.
        max_length: tokens kept of a sample, or of a window of it, special tokens included.
        overflow: what is kept of a longer sample.
        keep_going: called every thousand texts.

    Raises:
        DataError: ``max_length`` has no room for a text beside the special tokens, or for windows that overlap so far.
        ModelError: the tokenizer panics, as at a text for which its regular expression would take forever.
    """
    _require_room(tokenizer, pairs is not None, max_length)
    try:
        if overflow == HEAD:
            return _encode_heads(tokenizer, texts, pairs, max_length, keep_going)
        return _encode_and_cut(tokenizer, texts, pairs, max_length, overflow, keep_going)
    except BaseException as error:
        if not is_panic(error):
            raise
        name = getattr(tokenizer, "name_or_path", "") or "of the model"
        fix = "set model.tokenizer to another tokenizer, or leave out or shorten the text that it panics at"
        why = f"its code in Rust panicked: {first_line(error)}"
        raise ModelError(f"the tokenizer {name}: cannot encode a text", why, fix) from None


def _encode_heads(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, keep_going: KeepGoing
) -> Tokens:
    """Encode the beginnings of texts, as the tokenizer itself truncates them."""
    # of a pair both lengths together say how much is kept of each text
    texts, beyond = _heads(tokenizer, texts, max_length) if pairs is None else (texts, 0)
    dtype = _dtype_of(tokenizer)
    found: list[NDArray[np.unsignedinteger]] = []
    kept = _kept_types(tokenizer, texts, pairs, max_length)
    types: list[NDArray[np.uint8]] = []
    lengths, cut, second = list[int](), list[int](), list[int]()
    encoding = _encoded(tokenizer, texts, pairs, max_length, types=kept != "none")
    with _truncating(tokenizer, max_length), closing(encoding) as encoded:
        for ids, given, lost in encoded:
            keep_going()
            found.append(np.fromiter(chain.from_iterable(ids), dtype=dtype))
            lengths += map(len, ids)
            cut += lost
            if kept == "all":
                types.append(np.fromiter(chain.from_iterable(given), dtype=np.uint8))
            else:
                # where the first token of type 1 stands, or the length where every token is of type 0
                second += (len(each) - sum(each) for each in given)
    short = np.array(lengths, dtype=np.int64)
    offsets = np.concatenate(([0], short.cumsum()))
    whole = _whole_lengths(tokenizer, texts, pairs, short, cut, max_length, keep_going) + beyond
    return Tokens(
        flat=np.concatenate(found) if found else np.empty(0, dtype=dtype),
        offsets=offsets,
        whole=None if np.array_equal(whole, short) else whole,
        pairs=pairs is not None,
        **_of_tokenizer(tokenizer, kept, second, types),
    )


def _heads(tokenizer: Any, texts: Sequence[str], max_length: int) -> tuple[Sequence[str], NDArray[np.int64] | int]:
    """The beginnings of very long texts, the others whole; and the tokens that each has behind that."""
    if not tokenizer.is_fast or max(map(len, texts), default=0) <= PIECE_CHARACTERS:
        return texts, 0
    heads, beyond = list[str](), np.zeros(len(texts), dtype=np.int64)
    with _truncating(tokenizer, None):
        for at, text in enumerate(texts):
            head, beyond[at] = head_of(tokenizer.backend_tokenizer, text, max_length)
            heads.append(head)
    return heads, beyond


def _encode_and_cut(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    overflow: Overflow,
    keep_going: KeepGoing,
) -> Tokens:
    """``encode_texts`` where the tokenizer itself cuts otherwise."""
    room = max_length - tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if overflow.has_windows and pairs is None:
        overlapping(room, overflow)  # refused also where no text is too long
    dtype, kept = _dtype_of(tokenizer), _kept_types(tokenizer, texts, pairs, max_length)
    flat, types = list[NDArray[np.unsignedinteger]](), list[NDArray[np.uint8]]()
    second, whole, windows = list[int](), list[int](), [0]
    encoding = _encoded_whole(tokenizer, texts, pairs, max_length)
    with _truncating(tokenizer, None), closing(encoding) as encoded:
        for number, one in enumerate(encoded):
            if number % _CHUNK == 0:
                keep_going()
            places = _kept_places(one, room, overflow)
            ids: NDArray[np.unsignedinteger] = np.array(one.ids, dtype=dtype)
            given = np.array(one.types, dtype=np.uint8)
            flat += [ids[at] for at in places]
            whole.append(len(ids))
            windows.append(windows[-1] + len(places))
            if kept == "all":
                types += [given[at] for at in places]
            elif kept == "second":
                second += [len(at) - int(given[at].sum()) for at in places]
    lengths = np.array([len(piece) for piece in flat], dtype=np.int64)
    before = np.array(whole, dtype=np.int64)
    return Tokens(
        flat=np.concatenate(flat) if flat else np.empty(0, dtype=dtype),
        offsets=np.concatenate(([0], lengths.cumsum())),
        whole=before if (before > max_length).any() else None,
        pairs=pairs is not None,
        windows=np.array(windows, dtype=np.int64) if overflow.has_windows else None,
        **_of_tokenizer(tokenizer, kept, second, types),
    )


@dataclass(frozen=True)
class _Whole:
    """A sample with all of its tokens."""

    ids: list[int]
    types: list[int]
    text: NDArray[np.int64] | None
    """[len(ids)]: 0 for a token of the text, 1 for one of the second text, -1 for one that the tokenizer has added;
    None where the sample is short enough to stay whole."""


def _kept_places(one: _Whole, room: int, overflow: Overflow) -> list[NDArray[np.int64]]:
    """Positions of a sample's tokens that are kept, special ones included: one array, or one a window."""
    if one.text is None:
        return [np.arange(len(one.ids))]
    added, first, second = (np.flatnonzero(one.text == which) for which in (-1, 0, 1))
    if not len(second):
        return [np.sort(np.concatenate([added, first[at]])) for at in pieces(len(first), room, overflow)]
    cut = pieces_of_pair(len(first), len(second), room, overflow)
    return [np.sort(np.concatenate([added, first[a], second[b]])) for a, b in cut]


def _encoded_whole(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> Generator[_Whole]:
    """Samples one after the other, uncut; of those longer than ``max_length`` with what each token is of."""
    for chunk, others in _chunks(texts, pairs):
        if tokenizer.is_fast:
            given = chunk if others is None else list(zip(chunk, others, strict=True))
            for one in tokenizer.backend_tokenizer.encode_batch_fast(given):
                text = None
                if len(one) > max_length:
                    text = np.array([-1 if which is None else which for which in one.sequence_ids])
                    text[np.flatnonzero(one.special_tokens_mask)] = -1
                yield _Whole(one.ids, one.type_ids, text)
            continue
        settings = {"truncation": False, "return_attention_mask": False, "verbose": False}
        found = tokenizer(chunk, others, return_token_type_ids=True, return_special_tokens_mask=True, **settings)
        alone = tokenizer(chunk, add_special_tokens=False, **settings)["input_ids"]
        names = ("input_ids", "token_type_ids", "special_tokens_mask")
        for first, ids, types, mask in zip(alone, *(found[name] for name in names), strict=True):
            added = np.array(mask, dtype=bool)
            # the tokens that are not added are those of the first text, then those of the second
            text = np.where(added, -1, (~added).cumsum() > len(first)).astype(np.int64)
            yield _Whole(ids, types, text if len(ids) > max_length else None)


def _of_tokenizer(tokenizer: Any, kept: str, second: list[int], types: list[NDArray[np.uint8]]) -> dict[str, Any]:
    """What samples have from their tokenizer beside ids; ``kept`` as ``_kept_types`` has it."""
    return {
        "second": np.array(second, dtype=np.int32) if kept == "second" else None,
        "types": np.concatenate(types) if kept == "all" else None,
        "pad_id": padding_id(tokenizer),
        "typed": "token_type_ids" in tokenizer.model_input_names,
        "pad_type": int(tokenizer.pad_token_type_id) if kept == "all" else 0,
        "pad_left": tokenizer.padding_side == "left",
        "specials": tuple(sorted(tokenizer.all_special_ids)),
    }


def _whole_lengths(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    lengths: NDArray[np.int64],
    cut: Sequence[int],
    max_length: int,
    keep_going: KeepGoing,
) -> NDArray[np.int64]:
    """Tokens of every sample before it was cut.

    Slow tokenizers do not say what they ``cut`` off, some versions of the fast ones say too little, and none says it of
    pairs: samples that fill ``max_length`` are then encoded once more, uncut.
    """
    whole, full = lengths.copy(), np.flatnonzero(lengths >= max_length).tolist()
    if len(cut) == len(lengths) and (not full or _tells_all_it_cut(tokenizer, texts[full[0]], max_length)):
        return lengths + np.array(cut, dtype=np.int64)
    longer = [texts[i] for i in full], None if pairs is None else [pairs[i] for i in full]
    found: list[int] = []
    with _truncating(tokenizer, None), closing(_encoded(tokenizer, *longer, None, types=False)) as encoded:
        for ids, _, _ in encoded:
            keep_going()
            found += map(len, ids)
    whole[full] = found
    return whole


def _tells_all_it_cut(tokenizer: Any, text: str, max_length: int) -> bool:
    """Whether a fast tokenizer keeps all that it cuts off; tokenizers 0.23.1 and 0.23.2 keep a few tokens of it.

    Args:
        text: that fills ``max_length``; three times as much of it is tried.
    """
    backend, long = tokenizer.backend_tokenizer, " ".join([text] * 3)
    with _truncating(tokenizer, max_length):
        cut = backend.encode_batch_fast([long])[0]
    with _truncating(tokenizer, None):
        whole = backend.encode_batch_fast([long])[0]
    special = tokenizer.num_special_tokens_to_add(pair=False)
    return len(cut) + _lost(cut, len(cut), max_length, special) == len(whole)


def padding_id(tokenizer: Any) -> int:
    """Id of the filling; it is masked, so that any id does where a tokenizer has none of its own."""
    pad_id = tokenizer.pad_token_id
    return int(pad_id if pad_id is not None else tokenizer.eos_token_id or 0)


def truncate(tokens: Tokens, max_length: int) -> Tokens:
    """``tokens`` with at most ``max_length`` tokens of each sample; the same object when none is longer."""
    if int(tokens.lengths.max(initial=0)) <= max_length:
        return tokens
    lengths = np.minimum(tokens.lengths, max_length)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    kept = [tokens.flat[start : start + length] for start, length in zip(tokens.offsets[:-1], lengths, strict=True)]
    second = None if tokens.second is None else np.minimum(tokens.second, lengths).astype(np.int32)
    types = tokens.types
    if types is not None:
        types = np.concatenate([types[a : a + n] for a, n in zip(tokens.offsets[:-1], lengths, strict=True)])
    whole = tokens.lengths if tokens.whole is None else tokens.whole
    return replace(tokens, flat=np.concatenate(kept), offsets=offsets, second=second, types=types, whole=whole)


def _encoded(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None, *, types: bool
) -> Generator[tuple[list[list[int]], list[list[int]], list[int]]]:
    """Ids and, where they are asked for, token types of a chunk of samples after the other; and, where that is known,
    how many tokens each has lost.

    Args:
        max_length: None: nothing is cut.
        types: whether token types are asked for.
    """
    chunks = _chunks(texts, pairs)
    if tokenizer.is_fast:
        inputs = [chunk if others is None else list(zip(chunk, others, strict=True)) for chunk, others in chunks]
        special = tokenizer.num_special_tokens_to_add(pair=False)
        for encodings in _ahead(tokenizer.backend_tokenizer, inputs):
            ids, lost = [one.ids for one in encodings], []
            if pairs is None:
                lost = [_lost(one, len(kept), max_length, special) for one, kept in zip(encodings, ids, strict=True)]
            yield ids, [one.type_ids for one in encodings] if types else [], lost
        return
    for chunk, others in chunks:
        found = tokenizer(
            chunk,
            others,
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=types,
            verbose=False,  # about texts longer than the model takes, which are only counted
        )
        yield found["input_ids"], found["token_type_ids"] if types else [], []


def _chunks(texts: Sequence[str], pairs: Sequence[str] | None) -> list[tuple[list[str], list[str] | None]]:
    starts, size = [0] if len(texts) else [], 0
    for at, text in enumerate(texts):
        characters = len(text) + (0 if pairs is None else len(pairs[at]))
        if at > starts[-1] and (at - starts[-1] >= _CHUNK or size + characters > _CHUNK_CHARACTERS):
            starts.append(at)
            size = 0
        size += characters
    starts.append(len(texts))
    return [(list(texts[a:b]), None if pairs is None else list(pairs[a:b])) for a, b in pairwise(starts)]


def _lost(encoding: Any, kept: int, max_length: int | None, special: int) -> int:
    """Tokens that were cut off a text: they are kept in pieces, each of which has its own special tokens."""
    if max_length is None or kept < max_length:
        return 0
    return sum(len(piece) - special for piece in encoding.overflowing)


def _ahead(backend: Any, chunks: Sequence[list[Any]]) -> Iterator[list[Any]]:
    """The encodings of each chunk; while one is turned into arrays here, the tokenizer's threads encode the next."""
    with ThreadPoolExecutor(1, "paceline-encode") as worker:
        # unlike encode_batch, this does not compute the offsets of tokens in the text
        ahead = worker.submit(backend.encode_batch_fast, chunks[0]) if chunks else None
        for chunk in chunks[1:]:
            assert ahead is not None
            encodings = ahead.result()
            ahead = worker.submit(backend.encode_batch_fast, chunk)
            yield encodings
        if ahead is not None:
            yield ahead.result()


@contextmanager
def _truncating(tokenizer: Any, max_length: int | None) -> Iterator[None]:
    """Set a tokenizer up to cut on the right, and put it back afterwards; without a length nothing is cut.

    A fast one's backend is set up as a call with ``truncation=True`` does.
    """
    if not tokenizer.is_fast:
        side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
        try:
            yield
        finally:
            tokenizer.truncation_side = side
        return
    backend = tokenizer.backend_tokenizer
    truncation, padding, special = backend.truncation, backend.padding, backend.encode_special_tokens
    if max_length is None:
        backend.no_truncation()
    else:
        backend.enable_truncation(max_length, strategy="longest_first", direction="right")
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    try:
        yield
    finally:
        backend.encode_special_tokens = special
        if padding is not None:
            backend.enable_padding(**padding)
        if truncation is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(**truncation)


def _require_room(tokenizer: Any, pair: bool, max_length: int) -> None:
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < special + 1 + pair:
        raise DataError(
            f"data.max_length = {max_length}: no room for a text",
            why=f"the tokenizer adds {special} special tokens to every sample",
            fix=f"--set data.max_length={special + 1 + pair} at the very least",
        )


def _dtype_of(tokenizer: Any) -> type[np.uint16] | type[np.uint32]:
    # ids may have gaps, so that the number of tokens does not bound them
    return np.uint16 if max(tokenizer.get_vocab().values(), default=0) < 2**16 else np.uint32


def _kept_types(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> str:
    """How token types are kept: ``none`` (all are 0), ``second`` (0, then 1) or ``all``.

    The first sample tells: types come from the tokenizer's template, whatever a text says.
    """
    if "token_type_ids" not in tokenizer.model_input_names or not len(texts):
        return "none"
    with _truncating(tokenizer, max_length):
        first = _encoded(tokenizer, texts[:1], None if pairs is None else pairs[:1], max_length, types=True)
        _, [types], _ = next(first)
        first.close()
    if tokenizer.pad_token_type_id or sorted(types) != types or max(types, default=0) > 1:
        return "all"
    return "none" if pairs is None and not any(types) else "second"
