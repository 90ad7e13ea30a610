"""The encoding that the bytes of a text file allow, decided over the whole file; chardet judges what is no Unicode."""

from __future__ import annotations

import codecs
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import BinaryIO

SAMPLE_BYTES = 1_000_000
"""Bytes that are looked at when they are no UTF-8: lines with characters beyond ASCII, wherever these begin."""

LATIN = ("cp1252", "cp1250", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp850", "cp852")
"""Encodings of Latin letters, which fit each other's texts: a guess, where the other alphabets are hardly mistaken."""

_OTHER_ALPHABETS = (
    *("cp1251", "koi8-r", "koi8-u", "cp866", "iso8859-5"),
    *("cp1253", "iso8859-7", "cp1255", "cp1256", "iso8859-6", "cp874"),
)
_EAST_ASIAN = ("gb18030", "cp932", "cp949", "big5hkscs", "euc_jis_2004")
_WITH_ESCAPES = ("iso2022_jp_2", "iso2022_jp_2004", "iso2022_jp_ext", "iso2022_kr")
_PYTHON_NAMES = {"big5hkscs": "cp950", "iso2022_jp_2": "iso2022_jp", "euc_jis_2004": "euc_jp"}
"""Encodings as programs write them, where chardet names the largest of a family."""

_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_LEAST_SCORE = 0.045
"""Below this chardet has too little to go by; random bytes reach 0.03, two words of Korean 0.056."""

_WINDOWS_FIRST = 0.001
"""Taken off the score of encodings that are none of Windows: between equal ones, most files are of Windows."""

_MAX_PIECES = 5
"""Pieces of which a damaged one cannot rule out the encoding of the others."""

_WORD = re.compile(rb"[^\s\"',;]*[\x80-\xff][^\s\"',;]*")
_FOREIGN_WORD = re.compile(rb"[^a-zA-Z]*[\x80-\xff]{2}[^a-zA-Z]*")


def detect(file: BinaryIO) -> str | None:
    """Return the Python name of a file's encoding; None where the bytes are no UTF-8 and nothing else is plausible.

    The order is from the strictest to the laxest: few texts of another encoding are valid UTF-8, all are valid Latin-1.
    A file of UTF-8 with a few damaged bytes stays UTF-8, so that the damage is reported.
    """
    head = file.read(SAMPLE_BYTES)
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    if wide := marked or _utf16(head):
        return wide
    if b"\0" in head:
        return "utf-8"
    file.seek(0)
    if _is_utf8(file):
        has_escapes = b"\x1b" in head and head.isascii()
        return (has_escapes and _best(_scores([head], _WITH_ESCAPES))) or "utf-8"
    file.seek(0)
    return _plausible(_lines_beyond_ascii(file))


def _plausible(lines: Sequence[bytes]) -> str | None:
    """Return the encoding of lines that are not all UTF-8; ``utf-8`` where they mostly are, None: undecided."""
    sample = b"".join(lines)
    text = sample.decode(errors="replace")
    damaged = text.count("\ufffd")
    valid = sum(character > "\x7f" for character in text) - damaged
    if valid > damaged:
        return "utf-8"
    pieces = [b"".join(lines[first::_MAX_PIECES]) for first in range(min(_MAX_PIECES, len(lines)))]
    words = [list(dict.fromkeys(_WORD.findall(piece))) for piece in pieces]
    only_words = [b"\n".join(piece) for piece in words]
    if encoding := _best(_scores(only_words, _EAST_ASIAN)):
        return encoding if encoding != "cp950" or _decodes(sample, "cp950") else "big5hkscs"
    # a text in one byte a character holds a few pairs that are UTF-8 by chance; more of them are rows of UTF-8
    if 3 * valid > damaged:
        return "utf-8"
    # English texts tell nothing of labels in another alphabet
    all_words = [word for piece in words for word in piece]
    is_foreign = 2 * sum(_FOREIGN_WORD.fullmatch(word) is not None for word in all_words) > len(all_words)
    scores = _scores(only_words if is_foreign else pieces, (*LATIN, *_OTHER_ALPHABETS))
    encoding = _best(scores, least=0)
    if encoding in LATIN:
        # texts in Latin letters are mostly ASCII; others, read as such, would train as mojibake
        num_letters = sum(chr(byte).isalpha() for byte in sample if byte < 0x80)
        return encoding if 2 * sum(byte > 0x7F for byte in sample) <= num_letters else None
    return _best(scores)


def _scores(pieces: Sequence[bytes], encodings: Sequence[str]) -> dict[str, float]:
    """Return chardet's mean confidence in each encoding over the pieces that it fits, which have to be most of them."""
    import chardet

    scores, fitting = defaultdict[str, float](float), Counter[str]()
    for piece in pieces:
        results = chardet.detect_all(
            piece,
            ignore_threshold=True,
            compat_names=False,
            prefer_superset=False,
            include_encodings=[*encodings, "ascii"],
            no_match_encoding="ascii",
        )
        for result in results:
            name = result["encoding"] or "ascii"
            scores[name] += result["confidence"]
            fitting[name] += 1
    return {
        name: scores[name] / fitting[name] - _WINDOWS_FIRST * (not name.startswith("cp12"))
        for name in encodings
        if 2 * fitting[name] > len(pieces)
    }


def _best(scores: Mapping[str, float], least: float = _LEAST_SCORE) -> str | None:
    """Return the encoding of the highest score, as Python names it; None where it is below the least."""
    name, score = max(scores.items(), key=lambda item: item[1], default=("", 0.0))
    return _PYTHON_NAMES.get(name, name) if name and score >= least else None


def _decodes(sample: bytes, encoding: str) -> bool:
    try:
        sample.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _utf16(head: bytes) -> str | None:
    """Return UTF-16 without a mark: line ends and commas of any language have a zero byte on one side."""
    begin = head[: 1 << 16]
    for encoding, line_end, other in (("utf-16-le", b"\n\0", 0), ("utf-16-be", b"\0\n", 1)):
        zeros = begin[1 - other :: 2].count(0)
        if line_end in begin and zeros > len(begin) // 20 and not begin[other::2].count(0):
            # a character that the end of the head cuts is no error
            return encoding if _decodes(head if len(head) < SAMPLE_BYTES else head[:-2], encoding) else None
    return None


def _is_utf8(file: BinaryIO) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _until_damage(partial(file.read, SAMPLE_BYTES)):
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _lines_beyond_ascii(file: BinaryIO) -> list[bytes]:
    """Return the lines that hold bytes beyond ASCII, up to ``SAMPLE_BYTES`` of them."""
    lines, size = [], 0
    for line in _until_damage(partial(file.readline, SAMPLE_BYTES)):
        if not line.isascii():
            lines.append(line)
            size += len(line)
        if size >= SAMPLE_BYTES:
            break
    return lines


def _until_damage(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield what ``read`` gives, to the end or to where a gzip file is cut: who reads its lines says so, and where."""
    try:
        while chunk := read():
            yield chunk
    except (EOFError, OSError, zlib.error):
        return
