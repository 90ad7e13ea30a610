"""What in labels and texts is most likely a mistake: nothing is changed, each doubt is one line to read."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data.sources.notation import MISSING, are_bits, read_number
from paceline.data.table import Table
from paceline.data.task_rows import rows_of

Ids = NDArray[np.int64]

LOPSIDED = 0.95
"""Share of one class from which always guessing it looks like a good model."""

_DATE = re.compile(
    r"\d{4}[-/.年]\d{1,2}[-/.月]\d{1,2}日?([ T].*)?"
    r"|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})"
    r"|\d{1,2}[- ](jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*([- ]\d{2,4})?"
    r"|(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]\d{1,4}"
    r"|\d{1,2}月\d{1,2}日"
    r"|([上下]午)?([01]?\d|2[0-4]):[0-5]\d(:[0-5]\d([.,]\d+)?)?(\s?[ap]\.?m\.?)?"
    r"|(0?\d|1[0-2])\s?[ap]\.?m\.?"
    r"|([上下]午)?([01]?\d|2[0-4])[h时点][0-5]\d分?",
    re.IGNORECASE,
)
_OPENING = re.compile(r"""\[\s*['"{]|\(\s*['"]|\{\s*['"]|b['"]|(?:array|tensor)\(""")
_CLOSING = {"[": "]", "(": ")", "{": "}", "a": ")", "t": ")"}
_PIECE = re.compile(r"\[[^\]]*|[^\[]*\]|'.*'|\".*\"", re.DOTALL)
_BRACKETED = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
_WRITTEN_SHARE = 0.1
"""Share of the texts from which they are no accident; a text about programs may well be a list."""

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\d[\d.,]*")
_UNITS = (
    r"[kmgt]i?b|[kcmµ]?m|[km]?[gl]|lbs?|oz|ft|%|[kmb]n?|ms|s(ec(ond)?s?)?|min(ute)?s?|h(ou)?rs?|h|d(ays?)?|w(eek)?s?|"
    r"mo(nth)?s?|y(ea)?rs?|y|[年月周天日时分秒]|个月|小时|分钟|[千万亿]元?|元"
)
_AMOUNT = re.compile(rf"[-+]?(\d[\d.,]*\s*({_UNITS})\s*)+|\d+\s*/\s*\d+", re.IGNORECASE)
"""Numbers whose units may differ, such as ``10 g``, ``1h 30m`` or ``1/2``."""

_SEVERAL_NUMBERS = re.compile(r"\(?{0}(?:(?:\s*[,;|]\s*|\s+){0})+\)?".format(r"[-+]?\d+(?:\.\d+)?"))
_TRUTHS = (
    frozenset({"true", "t", "yes", "y", "1", "on", "是"}),
    frozenset({"false", "f", "no", "n", "0", "off", "否"}),
)
_JOINTS = ";|,#\t~+&/"
_WEAK_JOINTS = " -"
"""Characters that also stand within names."""
_NAMED = 3
"""Classes that a line names."""


def doubts(table: Table, keys: Ids, splits: Mapping[str, Ids]) -> tuple[str, ...]:
    """One line for each doubt about a table's texts and labels; of labels none without classes.

    Args:
        table: labelled rows.
        keys: [n] equal for rows with equal content, see ``duplicate_keys``.
        splits: row numbers of each split.
    """
    found = [*_written_texts(table)]
    task = None if table.kind is None else rows_of(table.kind)
    if table.labels is None or task is None or not task.has_classes:
        return tuple(found)
    rows = [task.classes_of(label) for label in table.labels]
    counts = Counter(name for names in rows for name in names)
    found += [
        *_contradictions(table, rows, keys),
        *_alike(counts),
        *_missing(counts),
        *_truths(counts),
        *_dates(counts, table.columns.get("label", "label")),
        *_written(counts),
        *_units(counts),
        *(_joined_or_numbers(counts) if task.one_class else ()),
        *_single(table, rows, counts),
    ]
    if task.one_class:
        found += _lopsided(Counter(rows[row][0] for row in splits["train"]))
    return tuple(found)


def _written_texts(table: Table) -> Iterator[str]:
    """Texts that a program wrote out as lists, bytes or objects: a model would learn their brackets and quotes."""
    texts = table.texts or ()
    rows = [row for row, text in enumerate(texts) if _is_written(text)]
    if rows and len(rows) >= _WRITTEN_SHARE * len(texts):
        example = f"{table.origins.of(rows[0])} has {_shown(texts[rows[0]])}"
        yield (
            f"{len(rows):,} of {len(texts):,} texts look like a list, bytes or an object written as text: {example};"
            " write the text itself (of bytes in pandas: .str.decode('utf-8'), of lists: .str.join(' '))"
        )


def _contradictions(table: Table, rows: Sequence[tuple[str, ...]], keys: Ids) -> Iterator[str]:
    """Equal content with different labels: no model can be right about all of it."""
    numbers: dict[frozenset[str], int] = {}
    labels = np.array([numbers.setdefault(frozenset(names), len(numbers)) for names in rows], dtype=np.int64)
    pairs, first = np.unique(np.stack([keys, labels]), axis=1, return_index=True)
    content, different = np.unique(pairs[0], return_counts=True)
    torn = content[different > 1]
    if not len(torn):
        return
    what = "images" if table.images is not None else "texts"
    said = sorted(int(row) for row in first[np.isin(pairs[0], torn)])
    example = [row for row in said if keys[row] == keys[said[0]]][:2]
    shown = ", ".join(f"{table.origins.of(row)} has {_shown(', '.join(rows[row]))}" for row in example)
    rows_of = int(np.isin(keys, torn).sum())
    occur = "occurs" if len(torn) == 1 else "occur"
    yield (
        f"{len(torn):,} {what if len(torn) > 1 else what[:-1]} {occur} more than once with different labels"
        f" ({rows_of:,} rows): {shown}"
    )


def _alike(counts: Mapping[str, int]) -> Iterator[str]:
    """Classes that are most likely one."""
    spellings: dict[str, list[str]] = {}
    for name in counts:
        spellings.setdefault(_bare(name), []).append(name)
    twice = [names for names in spellings.values() if len(names) > 1]
    if twice:
        spelt = [" and ".join(f"{_shown(name)} ({_rows(counts[name])})" for name in names) for names in twice]
        shown = "; ".join(spelt[:_NAMED])
        yield (
            f"labels that differ only by case, blanks or invisible characters count as different classes: {shown}"
            f"{_more(len(twice))}"
        )


def _missing(counts: Mapping[str, int]) -> Iterator[str]:
    """Classes that were a missing value before somebody wrote it as text."""
    named = [name for name in counts if name.casefold() in MISSING]
    if named:
        shown = ", ".join(f"{_shown(name)} ({_rows(counts[name])})" for name in named[:_NAMED])
        yield f"a class that is called like a missing value: {shown}{_more(len(named))}; remove these rows if it is one"


def _truths(counts: Mapping[str, int]) -> Iterator[str]:
    """Classes that are true or false, written in several ways."""
    words: dict[str, str] = {}
    for name in counts:
        words.setdefault(_bare(name), name)
    if words.keys() <= _TRUTHS[0] | _TRUTHS[1]:
        ways = [[repr(name) for word, name in words.items() if word in truth] for truth in _TRUTHS]
        shown = ", ".join(" and ".join(names) for names in ways if len(names) > 1)
        if shown:
            yield f"labels that most likely mean the same count as different classes: {shown}; write them alike"


def _dates(counts: Mapping[str, int], column: str) -> Iterator[str]:
    """Dates and times: of another column, or what a spreadsheet made of labels such as 1-2."""
    named = [name for name in counts if _DATE.fullmatch(name)]
    if named:
        shown = ", ".join(map(_shown, named[:_NAMED]))
        yield (
            f"labels that look like dates or times: {shown}{_more(len(named))}; is {column!r} the column of the"
            " label, or did a spreadsheet change it?"
        )


def _written(counts: Mapping[str, int]) -> Iterator[str]:
    """Lists, pieces of lists and bytes that a program wrote as text."""
    named = [name for name in counts if _is_written(name) or _PIECE.fullmatch(name)]
    if all(_BRACKETED.fullmatch(name) for name in counts):
        named = list(counts)
    if named:
        shown = ", ".join(map(_shown, named[:_NAMED]))
        yield (
            f"labels that look like a list, a piece of one, or bytes written as text: {shown}{_more(len(named))};"
            """ several labels are written ["slow", "rude"], a single one without quotes and brackets"""
        )


def _is_written(text: str) -> bool:
    """Whether a program most likely wrote ``text`` out from a list, a tuple, an object, an array or bytes."""
    text = text.strip()
    if text[:1] == "[" and not text.strip("[]0123456789., \n-"):
        return text[-1] == "]"  # numbers alone
    opening = _OPENING.match(text)
    return opening is not None and len(text) > 2 and text.endswith(_CLOSING.get(text[0], text[1]))


def _units(counts: Mapping[str, int]) -> Iterator[str]:
    """Numbers with words around them, the same or units of measurement: classes have no order."""
    if len(counts) < 2 or all(_DATE.fullmatch(name) or _is_number(name) for name in counts):
        return
    if _share_a_unit([*counts]) or all(map(_AMOUNT.fullmatch, counts)):
        shown = ", ".join(map(_shown, list(counts)[:_NAMED]))
        yield (
            f"labels that look like numbers with a unit are classes, which have no order: {shown}{_more(len(counts))};"
            " write the numbers alone to learn them as numbers (--set task.type=regression)"
        )


def _share_a_unit(names: Sequence[str]) -> bool:
    """Whether names differ by one number alone, before a unit or after a sign: ``4.5 out of 5``, ``>10``."""
    words = [[re.sub(r"s\b", "", word) for word in _NUMBER.split(name)] for name in names]
    if any(each != words[0] for each in words):
        return False
    numbers = [_NUMBER.findall(name) for name in names]
    varying = [at for at, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1:
        return False
    before, after = words[0][varying[0]].rstrip(), "".join(words[0][varying[0] + 1 :]).strip(" ,;|")
    if re.search(r"[A-Za-z0-9_.第-]$", before):
        return False  # v1, class 1, class-1 and type 1 error are names
    has_decimals = any(re.search(r"[.,]\d", number[varying[0]]) for number in numbers)
    return bool(after) or (bool(before) and (has_decimals or not re.search(r"\w", before)))


def _joined_or_numbers(counts: Mapping[str, int]) -> Iterator[str]:
    """Classes that say several things: other classes, bits, or numbers."""
    if are_bits(counts):
        shown = ", ".join(map(_shown, list(counts)[:_NAMED]))
        yield (
            f"labels that look like a 0 or 1 for each class, with nothing between them: {shown}{_more(len(counts))};"
            " several labels a row are written 0,1,1 (--set data.label_separator=,)"
        )
        return
    joined = list(_joined(counts))
    yield from joined
    if not joined and all(_SEVERAL_NUMBERS.fullmatch(name) and not _is_number(name) for name in counts):
        shown = ", ".join(map(_shown, list(counts)[:_NAMED]))
        yield (
            f"labels that look like several numbers are classes: {shown}{_more(len(counts))}; regression learns one"
            " number a row"
        )


def _joined(counts: Mapping[str, int]) -> Iterator[str]:
    """Classes that are made of other classes, joined by one character."""
    for mark in _JOINTS + _WEAK_JOINTS:
        joined = {name: [piece.strip() for piece in name.split(mark)] for name in counts if mark in name}
        occurring = Counter(piece for name in counts for piece in set(joined.get(name, [name])))
        known = counts if mark in _WEAK_JOINTS else {piece for piece, count in occurring.items() if count > 1}
        several = [name for name, pieces in joined.items() if _are_labels(pieces, known) and not _is_number(name)]
        if several and len(several) > 0.5 * len(joined):
            shown = ", ".join(map(_shown, several[:_NAMED]))
            setting = shlex.join(["--set", "data.label_separator=" + mark.replace("\t", r"\t")])
            yield (
                f"labels that look like several ones joined by {mark!r}: {shown}{_more(len(several))}; {setting} cuts"
                " them"
            )
            return


def _are_labels(pieces: Sequence[str], known: Collection[str]) -> bool:
    """Whether the pieces of a class are classes, also as fastText writes them, or 0 and 1 for each class."""
    return all(piece in known or piece in ("0", "1") or piece.startswith("__label__") for piece in pieces)


def _is_number(name: str) -> bool:
    return any(read_number(name, point) is not None for point in ".,")


def _single(table: Table, rows: Sequence[tuple[str, ...]], counts: Mapping[str, int]) -> Iterator[str]:
    """Classes of which there is nothing to measure on."""
    named = {name for name, count in counts.items() if count == 1}
    if named:
        places = {name: row for row, names in enumerate(rows) for name in names if name in named}
        shown = ", ".join(f"{_shown(name)} ({table.origins.of(row)})" for name, row in list(places.items())[:_NAMED])
        of = "1 class has" if len(named) == 1 else f"{len(named):,} classes have"
        yield f"{of} a single row, on which a model is trained or measured, never both: {shown}{_more(len(named))}"


def _lopsided(counts: Counter[str]) -> Iterator[str]:
    most, count = counts.most_common(1)[0]
    share = count / counts.total()
    if len(counts) > 1 and share >= LOPSIDED:
        yield (
            f"{count:,} of {counts.total():,} training rows are {_shown(most)}: always guessing it gives an accuracy of"
            f" {share:.3f}; f1, the mean over classes, tells more (--set loop.best_metric=f1 chooses the step by it)"
        )


def _bare(name: str) -> str:
    """A label without case, blanks, width and characters that cannot be seen."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(mark for mark in folded if not mark.isspace() and unicodedata.category(mark) != "Cf")


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _shown(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}…")


def _more(count: int) -> str:
    return f" and {count - _NAMED:,} more" if count > _NAMED else ""
