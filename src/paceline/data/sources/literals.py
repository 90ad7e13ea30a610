"""Lists that a program wrote as text into one cell: Python's, numpy's, JSON's. They are parsed; nothing is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from paceline.data.sources.notation import to_number

Item = str | bool | int | float

_CALL = re.compile(r"(?:array|tensor|list|tuple|set|frozenset)\((.*?)(?:,\s*(?:dtype|device)\s*=[^,()]*)*\)", re.DOTALL)
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_ITEM = re.compile(
    r"""\s*(?:'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,'"\[\](){}:]+))(?P<end>\s*[,:]\s*|\s+|$)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_LONGEST_NUMBER = 300
"""Characters; ``int`` refuses numbers of thousands of digits, and takes long over them."""


def read_list(text: str) -> tuple[Item, ...] | None:
    """Return the items of a flat list, tuple, set or array that ``text`` spells; None where it spells none.

    Of a mapping from names to 0 and 1, such as ``{"a": 1, "b": 0}``, the items are the names with a 1.
    """
    call = _CALL.fullmatch(text)
    if call is not None:
        text = call[1].strip() or "[]"
    opening, body = text[:1], text[1:-1].strip()
    if len(text) < 2 or text[-1] != _BRACKETS.get(opening):
        return None
    if not body:
        return ()
    if opening != "(":
        try:
            return _flat(json.loads(text))
        except (ValueError, RecursionError):
            pass  # not JSON: as Python or numpy writes it
    pairs = _scan(body, (":", ",")) if opening == "{" else None
    if pairs and len(pairs) % 2 == 0:
        return chosen_names(dict(zip(pairs[::2], pairs[1::2], strict=True)))
    items = _scan(body, (",", "") if "," not in body else (",",))
    is_tuple = opening != "(" or "," in body  # (1) is a number in brackets
    return tuple(items) if items is not None and is_tuple else None


def _flat(value: object) -> tuple[Item, ...] | None:
    """The items of a list or a mapping out of JSON; None where one is null, not finite, or a list itself."""
    if isinstance(value, Mapping):
        return chosen_names(value)
    items: list[Any] = value if isinstance(value, list) else [None]
    is_flat = all(isinstance(item, str) or (isinstance(item, int | float) and item - item == 0) for item in items)
    return tuple(items) if is_flat else None


def chosen_names(indicators: Mapping[Item, object]) -> tuple[Item, ...] | None:
    """Return the keys whose value is 1; None where a value is neither 0 nor 1."""
    is_indicator = all(isinstance(value, bool | int | float) and value in (0, 1) for value in indicators.values())
    return tuple(name for name, value in indicators.items() if value) if is_indicator else None


def _scan(body: str, separators: tuple[str, ...]) -> list[Item] | None:
    """The items of ``body``; between them the separators, in turn or, where one of them is empty, blanks."""
    items: list[Item] = []
    at, expected = 0, cycle(separators)
    blanks_separate = "" in separators
    while at < len(body):
        match = _ITEM.match(body, at)
        if match is None:
            return None
        item = _item(match)
        end, separator = match["end"].strip(), "" if blanks_separate else next(expected)
        if item is None or (end != separator and match.end() < len(body)):
            return None
        items.append(item)
        at = match.end()
    return items


def _item(match: re.Match[str]) -> Item | None:
    quoted = match["single"] if match["single"] is not None else match["double"]
    if quoted is not None:
        return _unescape(quoted)
    bare = match["bare"]
    if bare in _WORDS:
        return _WORDS[bare]
    number = to_number(bare) if len(bare) < _LONGEST_NUMBER else None
    if number is None or number - number != 0:  # a word, NaN or infinite
        return None
    return int(bare) if bare.lstrip("+-").isdecimal() else number


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)

    # JSON spells what lies beyond 16 bits as two halves
    halves = _ESCAPE.sub(replace, text).encode("utf-16", "surrogatepass")
    return halves.decode("utf-16", "surrogatepass")
