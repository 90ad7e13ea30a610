"""Numbers as people write them: decimal commas, groups of thousands, percent and currency signs."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_SIGNS = r"[%‰$€£¥₩₹₽₺元円]|(?:US\$|USD|EUR|GBP|CNY|RMB|JPY|CHF|INR|kr|Rs)\.?"
_MARKED = re.compile(rf"([-+]?)\s*({_SIGNS})?\s*([-+]?[\d.,].*?)\s*({_SIGNS})?", re.IGNORECASE)
_SPELLINGS = str.maketrans({"−": "-", "٫": ".", "٬": None, "’": "'"})
_LONGEST = 60
"""Characters of a number in another notation; of longer ones many ways to cut them would be tried."""

_FRACTION = re.compile(r"([-+]?)(\d*)\s*(\D)")


def _pattern(point: str, groups: str) -> re.Pattern[str]:
    indian = r"|[1-9]\d?(?:,\d\d)+,\d{3}" if point == "." else ""
    whole = rf"[1-9]\d{{0,2}}([{groups} '])\d{{3}}(?:\1\d{{3}})*{indian}|\d+"
    decimals = rf"[{point}]\d{'*' if point == '.' else '+'}"
    return re.compile(rf"[-+]?(?:(?:{whole})(?:{decimals})?|[{point}]\d+)(?:[eE][-+]?\d+)?")


_PATTERNS = {".": _pattern(".", ","), ",": _pattern(",", ".")}


MISSING = frozenset(
    {"nan", "none", "null", "nil", "na", "n/a", "#n/a", "#na", "<na>", "nat", "-", "--", "?", "无", "空"}
)
"""Words, in lower case, that stand for a value that is missing."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers that a column's cells spell, all in one notation."""

    values: Mapping[str, float]
    """Cell -> number, NaN and infinities included; cells that spell none are left out."""
    point: str = "."
    """What stands before decimals."""
    unusual: str = ""
    """The first cell whose number ``float`` would not read, or not surely as it is meant; empty: there is none."""
    mark: str = ""
    """The percent or currency sign that all of them have."""
    others: tuple[str, ...] = ()
    """Cells that spell a number in another notation."""
    ambiguous: str = ""
    """A cell such as ``1,000`` that is two numbers, where no other cell says which; then values are guesses."""


def are_bits(names: Collection[str]) -> bool:
    """Check whether names look like a 0 or 1 for each class: ``0101``, or 101 where a spreadsheet dropped the zero."""
    widths = {len(name) for name in names}
    if not names or max(widths) < 2 or set("".join(names)) - {"0", "1"}:
        return False
    if len(widths) == 1:
        return any(name[0] == "0" for name in names)
    return len(names) > 2 and max(widths) > 2


def to_number(text: str) -> float | None:
    """Return the number that a cell spells as Python writes it (NaN and infinities included), or None."""
    if "_" in text:  # float() takes Python's 1_000, a name for everybody else
        return None
    try:
        return float(text)
    except ValueError:
        return None


def read_number(text: str, point: str) -> float | None:
    """Return the number that ``text`` spells with ``point`` before its decimals, signs left out, or None."""
    return _readings(text)[1].get(point)


def read_numbers(counts: Counter[str], point: str = "auto") -> Numbers:
    """Read the cells of a column in the notation that most of them have.

    Args:
        counts: rows by cell.
        point: what stands before decimals, ``.`` or ``,``; auto: by the cells that can be read in one way only.
    """
    readings = {text: _readings(text) for text in counts}
    marks = Counter[str]()
    for text, (mark, numbers) in readings.items():
        if numbers:
            marks[mark] += counts[text]
    mark = max(marks, key=lambda one: marks[one], default="")
    numeric = {text: numbers for text, (own, numbers) in readings.items() if numbers and own == mark}
    ambiguous = unusual = ""
    if point == "auto":
        point, open_cell = _choose_point(numeric, counts)
        ambiguous, unusual = (open_cell, "") if "," in open_cell else ("", open_cell)
    values = {text: numbers[point] for text, numbers in numeric.items() if point in numbers}
    unusual = next((text for text, value in values.items() if not _same(to_number(text), value)), unusual)
    others = tuple(text for text, (_, numbers) in readings.items() if numbers and text not in values)
    return Numbers(values=values, point=point, unusual=unusual, mark=mark, others=others, ambiguous=ambiguous)


def _choose_point(numeric: Mapping[str, Mapping[str, float]], counts: Counter[str]) -> tuple[str, str]:
    """What stands before decimals, and a cell for which that is a guess."""
    only = Counter[str]()
    for text, numbers in numeric.items():
        if len(numbers) == 1:
            only[next(iter(numbers))] += counts[text]
    if only:
        return ("," if only[","] > only["."] else "."), ""
    open_cells = [text for text, numbers in numeric.items() if not _same(numbers["."], numbers[","])]
    return ".", next((text for text in open_cells if "," in text), open_cells[0] if open_cells else "")


def _readings(text: str) -> tuple[str, dict[str, float]]:
    """The sign at a cell's number, and the number by what may stand before its decimals."""
    plain = to_number(text)
    if plain is not None:
        numbers = {".": plain}
        if "." not in text or not math.isfinite(plain):
            numbers[","] = plain
        elif _PATTERNS[","].fullmatch(text):
            numbers[","] = float(text.replace(".", ""))
        return "", numbers
    if len(text) > _LONGEST:
        return "", {}
    spelled = _fraction(text)
    if spelled is not None:
        return "", {".": spelled, ",": spelled}
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_SPELLINGS)
    match = _MARKED.fullmatch(text)
    if match is None or (match[2] and match[4]) or (match[1] and match[3][0] in "+-"):
        return "", {}
    digits = match[1] + match[3]
    numbers = {
        point: float(re.sub(rf"[{other} ']", "", digits).replace(point, "."))
        for point, other in ((".", ","), (",", "."))
        if _PATTERNS[point].fullmatch(digits)
    }
    return (match[2] or match[4] or "").upper().rstrip("."), numbers


def _fraction(text: str) -> float | None:
    """The number of ``½`` or ``1½``."""
    match = _FRACTION.fullmatch(text)
    if match is None or not unicodedata.decomposition(match[3]).startswith("<fraction>"):
        return None
    number = int(match[2] or "0") + unicodedata.numeric(match[3])
    return -number if match[1] == "-" else number


def _same(one: float | None, other: float) -> bool:
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))
