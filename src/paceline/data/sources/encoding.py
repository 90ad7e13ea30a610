"""Which encoding the bytes of a text file allow, decided over its first megabyte."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable
from typing import BinaryIO

SAMPLE_BYTES = 1_000_000
"""Bytes that are looked at: many times the rows in which a rare character first shows, and no burden to memory."""

_PLAUSIBLE = 0.7
"""Share of the characters beyond ASCII that must be usual ones of the language; random bytes stay well below half."""


def detect(file: BinaryIO) -> str:
    """The Python name of a file's encoding; ``utf-8`` where nothing else is plausible.

    The order is from the strictest to the laxest: few texts of another encoding are valid UTF-8, all are valid Latin-1.
    A file of UTF-8 with a few damaged bytes stays UTF-8, so that the damage is reported.
    """
    sample = file.read(SAMPLE_BYTES)
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if (wide := _utf16(sample)) is not None:
        return wide
    if b"\0" in sample or _decoded(sample, "utf-8") is not None or _mostly_utf8(sample):
        return "utf-8"
    if _share(sample, "gb18030", _is_usual_chinese) >= _PLAUSIBLE:
        return "gb18030"
    if _share(sample, "cp932", _is_japanese) >= _PLAUSIBLE:
        return "cp932"
    # Western languages are mostly ASCII letters; Cyrillic, Big5 and the like are not, and would train as mojibake
    if 2 * sum(byte > 0x7F for byte in sample) > sum(chr(byte).isalpha() for byte in sample if byte < 0x80):
        return "utf-8"
    return "cp1252" if _share(sample, "cp1252", _is_latin) >= _PLAUSIBLE else "utf-8"


def _utf16(sample: bytes) -> str | None:
    """UTF-16 without a mark: the line ends and commas of any language have a zero byte on one side."""
    head = sample[: 1 << 16]
    for encoding, line_end, other in (("utf-16-le", b"\n\0", 0), ("utf-16-be", b"\0\n", 1)):
        zeros = head[1 - other :: 2].count(0)
        if line_end in head and zeros > len(head) // 20 and not head[other::2].count(0):
            return encoding if _decoded(sample, encoding) is not None else None
    return None


def _decoded(sample: bytes, encoding: str) -> str | None:
    """The text, or None; a character that the sample's end cuts is no error."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(sample, final=len(sample) < SAMPLE_BYTES)
    except UnicodeDecodeError:
        return None


def _mostly_utf8(sample: bytes) -> bool:
    text = sample.decode(errors="replace")
    damaged = text.count("\ufffd")
    return sum(character > "\x7f" for character in text) - damaged > damaged


def _share(sample: bytes, encoding: str, usual: Callable[[str], bool]) -> float:
    text = _decoded(sample, encoding)
    beyond = [character for character in text or "" if character > "\x7f"]
    return sum(map(usual, beyond)) / len(beyond) if beyond else 0.0


def _is_usual_chinese(character: str) -> bool:
    """Whether it is in the first level of GB 2312, the characters of nearly all running text, or punctuation."""
    raw = character.encode("gb18030")
    return len(raw) == 2 and (0xB0 <= raw[0] <= 0xD7 or raw[0] in (0xA1, 0xA3)) and raw[1] >= 0xA1


def _is_japanese(character: str) -> bool:
    return "\u3000" <= character <= "\u30ff" or "\u4e00" <= character <= "\u9fff" or "\uff01" <= character <= "\uff5e"


def _is_latin(character: str) -> bool:
    return unicodedata.category(character)[0] in "LPS"
