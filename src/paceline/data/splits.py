"""Splitting rows into train, validation and test: stratified, seeded, and never one text in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError
from paceline.data.table import Table
from paceline.data.task_rows import rows_of
from paceline.recipe.parts import SplitsPart

SPLITS = ("train", "validation", "test")
"""Names of the splits, in the order in which they are shown."""

Ids = NDArray[np.int64]

FIRST_WORDS, FIRST_CHARACTERS = 12, 256
"""How much of a text is compared before the whole: a few words, and the characters in which they are looked for."""


@dataclass(frozen=True)
class Splits:
    """Who learns from which row."""

    splits: Mapping[str, Ids]
    """Sorted row numbers of each split that has any."""
    notices: tuple[str, ...]


def duplicate_keys(table: Table) -> Ids:
    """[n]: equal numbers for rows with equal content.

    Texts are compared casefolded and with white space collapsed, both texts of a pair together; images and token
    sequences byte for byte.
    """
    begins_alone = np.zeros(len(table), dtype=bool)
    if table.texts is not None:
        # most texts begin as no other does, and need not be read to their end; so do those whose hashes are not equal
        begins = np.fromiter((hash(_first_words(text)) for text in table.texts), np.int64, len(table))
        _, place, count = np.unique(begins, return_inverse=True, return_counts=True)
        begins_alone = count[place] == 1
    seen: dict[object, int] = {}
    keys = np.empty(len(table), dtype=np.int64)
    for row, is_alone in enumerate(begins_alone.tolist()):
        content = row if is_alone else hashlib.blake2b(_content(table, row), digest_size=16).digest()
        keys[row] = seen.setdefault(content, len(seen))
    return keys


def split_rows(
    labels: Sequence[str] | Sequence[float] | Sequence[tuple[str, ...]],
    kind: str,
    keys: Ids,
    given: Sequence[str] | None,
    part: SplitsPart,
) -> Splits:
    """Split rows into splits.

    Counts and rounded shares are met exactly wherever duplicates allow it; every class has at least one row in train
    wherever train has room for it. Given splits are kept as they are; only a missing validation split is taken out
    of train, unless ``part.validation`` is 0.

    Args:
        labels: [n] as the table has them.
        kind: name of the task.
        keys: [n] equal for rows that must stay together, see ``duplicate_keys``.
        given: [n] split of each row, or None.
        part: the shares or counts and the seed.

    Raises:
        DataError: fewer rows than asked for, or none left for train.
    """
    sheet = _Sheet(labels, kind, keys)
    everything = np.arange(len(keys), dtype=np.int64)
    if given is None:
        return _split(sheet, everything, part, part.test)
    named = np.asarray(given)
    splits = {name: rows for name in SPLITS if len(rows := np.flatnonzero(named == name).astype(np.int64))}
    if "train" not in splits:
        raise DataError(
            "no row belongs to train",
            why=f"the given splits are {', '.join(splits) or 'empty'}",
            fix="give rows of the split 'train', or ignore the given splits with data.split=null",
        )
    notices = _shared_texts(keys, splits)
    if "validation" not in splits and part.validation:
        # a limit on train would leave given training rows unused, which nobody asked for
        rest = part.model_copy(update={"train": None})
        divided = _split(sheet, splits["train"], rest, 0)
        taken = len(divided.splits.get("validation", ()))
        if taken:
            notices += (f"no validation split is given: {taken:,} rows are taken out of train",)
        notices += divided.notices
        splits = {
            name: {**splits, **divided.splits}[name] for name in SPLITS if name in splits or name in divided.splits
        }
    return Splits(splits, notices)


class _Sheet:
    """What splitting needs to know of each row."""

    def __init__(self, labels: Sequence[Any], kind: str, keys: Ids) -> None:
        self.keys = keys
        task = rows_of(kind)
        self.classes = [task.classes_of(label) for label in labels]
        self.strata = task.strata(labels)


def _split(sheet: _Sheet, rows: Ids, part: SplitsPart, test: float | int) -> Splits:
    targets = _targets(len(rows), part, test)
    random = np.random.default_rng(part.seed)
    groups = _groups(sheet.keys[rows], random)
    sizes = np.array([len(group) for group in groups])
    strata = np.array([sheet.strata[rows[group[0]]] for group in groups])
    owner = np.full(len(groups), -1)  # index into SPLITS; -1: not placed yet
    kept, few = _kept_for_train(sheet, rows, groups, targets)
    owner[kept] = 0
    notices = list(few)
    for name in ("test", "validation", "train"):
        split = SPLITS.index(name)
        wanted = targets[name]
        if wanted is None:
            owner[owner == -1] = split
            continue
        _fill(owner, sizes, strata, split, wanted - int(sizes[owner == split].sum()), random)
        found = int(sizes[owner == split].sum())
        asked = {"test": test, "validation": part.validation}.get(name, 0)
        if asked and not wanted:
            notices.append(f"{name} has no rows: data.splits.{name} = {asked:g} of {len(rows):,} rows is less than one")
        if found != wanted:
            notices.append(f"{name} has {found:,} rows instead of {wanted:,}: copies of a sample are kept in one split")
    if unused := int(sizes[owner == -1].sum()):
        notices.append(f"{unused:,} rows belong to no split: data.splits leaves them over")
    splits = {}
    for split, name in enumerate(SPLITS):
        chosen = [groups[index] for index in np.flatnonzero(owner == split)]
        if chosen:
            splits[name] = np.sort(rows[np.concatenate(chosen)])
    if "train" not in splits:
        raise DataError(f"no row is left for train out of {len(rows):,}", fix="make the other splits smaller")
    return Splits(splits, tuple(notices))


def _targets(num_rows: int, part: SplitsPart, test: float | int) -> dict[str, int | None]:
    """Rows of each split; None: the rest. Shares are rounded so that shares of 1 in total use every row."""
    asked = {"train": part.train, "validation": part.validation, "test": test}
    targets: dict[str, int | None] = {}
    share, used = 0.0, 0
    for name, value in asked.items():
        if value is None:
            targets[name] = None
        elif 0 < value < 1:
            share += value
            targets[name] = round(share * num_rows) - used
            used += targets[name] or 0
        else:
            targets[name] = int(value)
    total = sum(value or 0 for value in targets.values())
    shown = ", ".join(f"{name} {'the rest' if value is None else f'{value:,}'}" for name, value in targets.items())
    if total > num_rows:
        raise DataError(
            f"data.splits asks for {total:,} rows ({shown}), but there are {num_rows:,}",
            fix="lower the counts, or give shares below 1",
        )
    if targets["train"] == 0 or (targets["train"] is None and total == num_rows):
        raise DataError(
            f"no row is left for train ({shown}, of {num_rows:,} rows)",
            fix="make data.splits.validation and data.splits.test smaller",
        )
    return targets


def _groups(keys: Ids, random: np.random.Generator) -> list[Ids]:
    """Positions of the rows of each distinct key, the keys in random order."""
    _, inverse = np.unique(keys, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    bounds = np.cumsum(np.bincount(inverse))[:-1]
    groups = np.split(order.astype(np.int64), bounds)
    return [groups[index] for index in random.permutation(len(groups))]


def _kept_for_train(
    sheet: _Sheet, rows: Ids, groups: list[Ids], targets: Mapping[str, int | None]
) -> tuple[list[int], tuple[str, ...]]:
    """One group of every class, so that none is missing from train, and a notice naming the classes that are small."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        # a set has no fixed order, and the split must not depend on the process
        for name in sorted({name for position in group for name in sheet.classes[rows[position]]}):
            members.setdefault(name, []).append(index)
    num_splits = sum(value is None or value > 0 for value in targets.values())
    room = targets["train"]
    if room is None:
        room = len(rows) - sum(value or 0 for value in targets.values())
    kept: dict[int, None] = {}
    for name in sorted(members, key=lambda name: len(members[name])):
        first = members[name][0]
        if kept.keys().isdisjoint(members[name]) and len(groups[first]) <= room:
            kept[first] = None
            room -= len(groups[first])
    few = sorted(name for name, found in members.items() if len(found) < num_splits)
    if not few:
        return [*kept], ()
    shown = ", ".join(few[:5]) + (f" and {len(few) - 5:,} more" if len(few) > 5 else "")
    return [*kept], (f"classes with fewer different samples than splits are put into train first: {shown}",)


def _fill(owner: Ids, sizes: Ids, strata: Ids, split: int, wanted: int, random: np.random.Generator) -> None:
    """Give ``split`` groups that sum to ``wanted`` rows, each stratum its proportional part."""
    free = np.flatnonzero(owner == -1)
    free = free[np.argsort(strata[free], kind="stable")]
    left = np.split(free, np.flatnonzero(np.diff(strata[free])) + 1) if len(free) else []
    quotas = _quotas(wanted, np.array([sizes[members].sum() for members in left]), random)
    for members, quota in zip(left, quotas, strict=True):
        wanted -= _take(owner, sizes, members, split, int(quota))
    if wanted:
        # a stratum of copies could not give its part to the row: other strata make up for it
        _take(owner, sizes, np.flatnonzero(owner == -1), split, wanted)


def _take(owner: Ids, sizes: Ids, members: Ids, split: int, wanted: int) -> int:
    """Give ``split`` the first of ``members`` that fit into ``wanted`` rows; returns the rows given."""
    given = 0
    for index in members:
        if given == wanted:
            break
        if given + sizes[index] <= wanted:
            owner[index] = split
            given += int(sizes[index])
    return given


def _quotas(wanted: int, available: Ids, random: np.random.Generator) -> Ids:
    """``wanted`` rows over strata in proportion to ``available``, by largest remainder, ties at random."""
    total = int(available.sum())
    if wanted >= total:
        return available
    exact = available * (wanted / total)
    quotas: Ids = np.floor(exact).astype(np.int64)
    most = np.lexsort((random.random(len(exact)), quotas - exact))[: wanted - int(quotas.sum())]
    quotas[most] += 1
    return quotas


def _content(table: Table, row: int) -> bytes:
    if table.images is not None:
        pixels: bytes = table.images[row].tobytes()
        return pixels
    if table.tokens is not None:
        start, stop = table.tokens.offsets[row : row + 2]
        return table.tokens.flat[start:stop].tobytes()
    assert table.texts is not None
    texts = [table.texts[row]] if table.pairs is None else [table.texts[row], table.pairs[row]]
    # lone surrogates, which JSON escapes can spell, have no UTF-8 form
    return "\0".join(" ".join(text.casefold().split()) for text in texts).encode("utf-8", "surrogatepass")


def _first_words(text: str) -> tuple[str, ...]:
    """The first of the words that ``_content`` makes of a text: equal where that is, and mostly different where not."""
    words = text[:FIRST_CHARACTERS].casefold().split()
    if len(words) <= FIRST_WORDS:  # the last one may be cut
        words = text.casefold().split()
    return tuple(words[:FIRST_WORDS])


def _shared_texts(keys: Ids, splits: Mapping[str, Ids]) -> tuple[str, ...]:
    notices = []
    for name in ("validation", "test"):
        if name in splits and (shared := int(np.isin(keys[splits[name]], keys[splits["train"]]).sum())):
            notices.append(
                f"{shared:,} of {len(splits[name]):,} rows of {name} are also in train: its metrics flatter the model"
            )
    return tuple(notices)
