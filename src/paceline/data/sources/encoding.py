"""Which encoding the bytes of a text file allow, decided over the whole file."""

from __future__ import annotations

import codecs
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

SAMPLE_BYTES = 1_000_000
"""Bytes that are looked at when they are no UTF-8: lines with characters beyond ASCII, wherever these begin."""

_PLAUSIBLE = 0.7
"""Share of the characters beyond ASCII that must be usual ones of the language; random bytes stay well below half."""

_KOREAN = frozenset("이다는을가에의도고지하한은로서")
_CHINESE = frozenset("的一是不了在有我这他她们人来大上个到说时要就出会可也你对那得着下自之年过发后里用去能没好很都")
"""Syllables and characters of which a fifth of all running text is made; the other language hardly has them."""

_FUNCTION_WORDS = 0.1
_FEWEST_PARTICLES = 3

_CYRILLIC = frozenset("оеаинт")
_CYRILLIC_SHARE = 0.38
"""Almost half of the letters of a Slavic text; Greek and Hebrew, read as Cyrillic, have 20 to 30 % of them."""

_ONLY_CYRILLIC = frozenset("ыьэюяі")
"""Where Hebrew has no letters."""

_FEWEST_THAI = 15
"""Different characters, at the least; a few Chinese words may look like Thai."""

_SURELY_CHINESE = 0.9
"""Share of usual Chinese characters in Chinese; Thai, read as such, has about seven in ten."""

_THAI_BEHIND = frozenset("ะัาำิีึืฺุู็่้๊๋์ํ๎")
_THAI_BEFORE = frozenset("เแโใไ")
_THAI_PLACED, _FEWEST_PLACED = 0.25, 10
"""Share of those in all Thai letters, at the least, which is over a third in running text; and their number."""

_CENTRAL = ("cp1250", "iso8859-2")
_SYMBOLS, _FEWEST_SYMBOLS = 0.05, 3
"""Symbols inside words that no Western text has: as a share of the characters beyond ASCII, and in number."""

_BETWEEN_LETTERS = frozenset("’‘´`·•\xad\xa0–—…“”„«»‹›")
"""What Western texts have between two letters besides letters."""

_STAND_ALONE = frozenset((0x85, 0x91, 0x92, 0x93, 0x94, 0x96, 0x97, *range(0xDF, 0x100)))
"""Quotes, dashes and small letters of Latin encodings."""

_KANA_LEADS = frozenset((0x81, 0x82, 0x83))
"""First bytes of kana and punctuation in Shift-JIS, whose second is often an ASCII letter; no letters in Latin ones."""

_ALONE = 0.25
"""Share of bytes by themselves in a Latin alphabet, at the least; an East Asian text has less than a tenth, where a
character whose second byte is ASCII follows another such one."""

_FEWEST_LETTERS = 20
_SHORT_TRAILS = 0.1
"""Share of Big5's characters whose second byte is ASCII, at the least: it is 40 %, and none in the EUC encodings."""


def detect(file: BinaryIO) -> str | None:
    """The Python name of a file's encoding; None where the bytes are no UTF-8 and nothing else is plausible.

    The order is from the strictest to the laxest: few texts of another encoding are valid UTF-8, all are valid Latin-1.
    A file of UTF-8 with a few damaged bytes stays UTF-8, so that the damage is reported.
    """
    head = file.read(SAMPLE_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if (wide := _utf16(head)) is not None:
        return wide
    if b"\0" in head:
        return "utf-8"
    file.seek(0)
    if _is_utf8(file):
        return "utf-8"
    file.seek(0)
    return plausible(_beyond_ascii(file))


def plausible(sample: bytes) -> str | None:
    """The encoding of bytes beyond ASCII that are not all UTF-8; ``utf-8`` where they mostly are, None: undecided."""
    text = sample.decode(errors="replace")
    damaged = text.count("\ufffd")
    valid = sum(character > "\x7f" for character in text) - damaged
    if valid > damaged:
        return "utf-8"
    alone, found = _stand_alone(sample), _of_other_scripts(sample)
    if found and not (alone and _is_by_chance(sample, found)):
        return found
    if not alone and _is_cyrillic(sample):
        return "cp1251"
    # a text in one byte a character holds a few pairs that are UTF-8 by chance; more of them are rows of UTF-8
    if 3 * valid > damaged:
        return "utf-8"
    # Western languages are mostly ASCII letters; Greek, Hebrew and the like are not, and would train as mojibake
    if 2 * sum(byte > 0x7F for byte in sample) > sum(chr(byte).isalpha() for byte in sample if byte < 0x80):
        return None
    return _latin_alphabet(sample)


def _stand_alone(sample: bytes) -> bool:
    """Whether letters beyond ASCII stand by themselves behind ASCII ones, or quotes and small letters among ASCII."""
    beyond = [at for at, byte in enumerate(sample) if byte > 0x7F]
    alone = sum(
        sample[at - 1 : at].isascii()
        and sample[at + 1 : at + 2].isascii()
        and (sample[at] in _STAND_ALONE or (sample[at - 1 : at].isalpha() and sample[at] not in _KANA_LEADS))
        for at in beyond
    )
    return alone > _ALONE * len(beyond)


def _is_by_chance(sample: bytes, encoding: str) -> bool:
    """Whether accented letters, each with what follows it, only look like characters: not all do, or none is kana."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return True
    return encoding == "cp932" and not any("\u3000" <= character <= "\u30ff" for character in text)


def _of_other_scripts(sample: bytes) -> str | None:
    """The encoding of Thai, Korean, Chinese or Japanese; None: it is none of them."""
    if _is_thai(sample):
        return "cp874"
    if _is_korean(sample):
        return "cp949"
    if _share(sample, "gb18030", _is_usual_chinese) >= _PLAUSIBLE:
        return "gb18030"
    if _is_big5(sample):
        return "cp950"
    return "cp932" if _share(sample, "cp932", _is_japanese) >= _PLAUSIBLE else None


def _latin_alphabet(sample: bytes) -> str | None:
    """Western, or Central European where Western would have symbols inside words; None: neither."""
    inside, beyond = _symbols_in_words(sample, "cp1252"), sum(byte > 0x7F for byte in sample)
    if inside >= max(_FEWEST_SYMBOLS, _SYMBOLS * beyond):
        central = min(_CENTRAL, key=lambda encoding: _symbols_in_words(sample, encoding))
        fits = _share(sample, central, _is_latin) >= _PLAUSIBLE
        if fits and 10 * _symbols_in_words(sample, central) <= inside:
            return central
    return "cp1252" if _share(sample, "cp1252", _is_latin) >= _PLAUSIBLE else None


def _symbols_in_words(sample: bytes, encoding: str) -> int:
    """How many characters beyond ASCII stand between two letters and are none: ``by³a`` is no word, ``była`` is."""
    text = sample.decode(encoding, "replace")
    places = (at for at, character in enumerate(text) if character > "\x7f")
    between = ((text[at - 1 : at], text[at], text[at + 1 : at + 2]) for at in places)
    return sum(
        before.isalpha() and after.isalpha() and not _may_stand_in_a_word(character)
        for before, character, after in between
    )


def _may_stand_in_a_word(character: str) -> bool:
    if character in "ªº":
        return False  # letters to Unicode, but they end a word
    return character.isalpha() or character in _BETWEEN_LETTERS


def _is_thai(sample: bytes) -> bool:
    """Whether vowels and tones stand where Thai has them: some before a consonant, the others behind one."""
    beyond = _decoded(sample, "cp874")
    thai = sum("\u0e01" <= character <= "\u0e5b" for character in beyond)
    if len(set(beyond)) < _FEWEST_THAI or thai < 0.95 * len(beyond):
        return False
    if _share(sample, "gb18030", _is_usual_chinese) >= _SURELY_CHINESE:
        return False
    text = sample.decode("cp874", "replace")
    consonants = [("ก" <= character <= "ฮ") for character in text] + [False]
    behind = [at for at, character in enumerate(text) if character in _THAI_BEHIND]
    before = [at for at, character in enumerate(text) if character in _THAI_BEFORE]
    right = sum(consonants[at - 1] or text[at - 1 : at] in _THAI_BEHIND for at in behind)
    right += sum(consonants[at + 1] for at in before)
    placed = len(behind) + len(before)
    return placed >= max(_FEWEST_PLACED, _THAI_PLACED * thai) and right >= 0.98 * placed


def _utf16(head: bytes) -> str | None:
    """UTF-16 without a mark: the line ends and commas of any language have a zero byte on one side."""
    begin = head[: 1 << 16]
    for encoding, line_end, other in (("utf-16-le", b"\n\0", 0), ("utf-16-be", b"\0\n", 1)):
        zeros = begin[1 - other :: 2].count(0)
        if line_end in begin and zeros > len(begin) // 20 and not begin[other::2].count(0):
            try:
                # a character that the end of the head cuts is no error
                codecs.getincrementaldecoder(encoding)().decode(head, final=len(head) < SAMPLE_BYTES)
            except UnicodeDecodeError:
                return None
            return encoding
    return None


def _is_utf8(file: BinaryIO) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _until_damage(partial(file.read, SAMPLE_BYTES)):
            decoder.decode(chunk)
    except UnicodeDecodeError:
        return False
    return True


def _beyond_ascii(file: BinaryIO) -> bytes:
    """Lines that hold bytes beyond ASCII, up to ``SAMPLE_BYTES`` of them."""
    kept, size = [], 0
    for line in _until_damage(partial(file.readline, SAMPLE_BYTES)):
        if not line.isascii():
            kept.append(line)
            size += len(line)
        if size >= SAMPLE_BYTES:
            break
    return b"".join(kept)


def _until_damage(read: Callable[[], bytes]) -> Iterator[bytes]:
    """What ``read`` gives, to the end or to where a gzip file is cut: who reads its lines says so, and where."""
    try:
        while found := read():
            yield found
    except (EOFError, OSError, zlib.error):
        return


def _share(sample: bytes, encoding: str, usual: Callable[[str], bool]) -> float:
    """Share of usual characters among those beyond ASCII; what does not decode is unusual."""
    beyond = _decoded(sample, encoding)
    return sum(map(usual, beyond)) / len(beyond) if beyond else 0.0


def _decoded(sample: bytes, encoding: str) -> list[str]:
    """The characters beyond ASCII; one that the sample's end cuts is left out."""
    text = codecs.getincrementaldecoder(encoding)("replace").decode(sample)
    return [character for character in text if character > "\x7f"]


def _is_korean(sample: bytes) -> bool:
    """Whether it reads as Korean rather than as Chinese: all Hangul is in the common part of GB 2312, too.

    What tells them apart is what each language is made of: particles here, pronouns and the like there.
    """
    hangul = _decoded(sample, "cp949")
    if not hangul or sum("가" <= syllable <= "힣" for syllable in hangul) < 0.9 * len(hangul):
        return False
    if len(_KOREAN.intersection(hangul)) < _FEWEST_PARTICLES:
        return False  # a word or two, which many Chinese characters could be
    korean = sum(syllable in _KOREAN for syllable in hangul)
    chinese = sum(character in _CHINESE for character in _decoded(sample, "gb18030"))
    return korean > chinese and korean >= _FUNCTION_WORDS * len(hangul)


def _is_usual_chinese(character: str) -> bool:
    """Whether it is in the first level of GB 2312, the characters of nearly all running text, or punctuation."""
    raw = character.encode("gb18030")
    return len(raw) == 2 and (0xB0 <= raw[0] <= 0xD7 or raw[0] in (0xA1, 0xA3)) and raw[1] >= 0xA1


def _is_big5(sample: bytes) -> bool:
    """Whether it is mostly of Big5's frequent characters, and some of them end on a byte of ASCII."""
    raw = [character.encode("cp950", "replace") for character in _decoded(sample, "cp950")]
    usual = [pair for pair in raw if len(pair) == 2 and 0xA1 <= pair[0] <= 0xC6]
    short = sum(pair[1] < 0x80 for pair in usual)
    return len(usual) >= _PLAUSIBLE * len(raw) and short >= _SHORT_TRAILS * len(raw) > 0


def _is_japanese(character: str) -> bool:
    return "\u3000" <= character <= "\u30ff" or "\u4e00" <= character <= "\u9fff" or "\uff01" <= character <= "\uff5e"


def _is_cyrillic(sample: bytes) -> bool:
    """Whether it reads as a Slavic text in small letters; KOI8-R, which has the cases the other way round, does not."""
    beyond = _decoded(sample, "cp1251")
    letters = [character for character in beyond if "\u0400" <= character <= "\u04ff"]
    if len(letters) < _FEWEST_LETTERS or len(letters) < _PLAUSIBLE * len(beyond):
        return False
    if _ONLY_CYRILLIC.isdisjoint(letters) or 2 * sum(map(str.islower, letters)) <= len(letters):
        return False
    return sum(letter.lower() in _CYRILLIC for letter in letters) >= _CYRILLIC_SHARE * len(letters)


def _is_latin(character: str) -> bool:
    return unicodedata.category(character)[0] in "LPS"
