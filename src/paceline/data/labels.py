"""From labels as written in the source to the numbers that a loss takes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import (
    are_unnamed,
    listed,
    number_of,
    numbered,
    rows_by_name,
    rows_by_number,
    rows_by_truth,
    rows_by_value,
    sorted_names,
)
from paceline.data.dataset import Origins
from paceline.data.task_rows import TaskRows, Values, rows_of

_NEAR = 0.75
"""Likeness, up to 1, from which a label is taken for a misspelt one."""


@dataclass(frozen=True)
class Labels:
    """Encoded labels and what their indices mean."""

    values: Values
    names: tuple[str, ...]
    """Class names in index order; one name for regression."""
    notices: tuple[str, ...] = ()


def class_names(labels: Sequence[Any], kind: str) -> tuple[str, ...]:
    """Distinct class names in the order of ``sorted_names``."""
    classes_of = rows_of(kind).classes_of
    return sorted_names({name for label in labels for name in classes_of(label)})


def encode_labels(
    labels: Sequence[Any],
    kind: str,
    splits: Mapping[str, NDArray[np.int64]],
    origins: Origins,
    *,
    target: str = "target",
    allow_single_class: bool = False,
    head: Sequence[str] = (),
    order: Sequence[str] = (),
) -> Labels:
    """Labels of a set to train on; the classes are those of ``splits["train"]``.

    Args:
        labels: [n] names, numbers (regression) or tuples of names (multi-label).
        kind: name of the task.
        splits: sample ids of each split.
        origins: where each sample came from, for errors.
        target: the label's column; the name of a regression's one output.
        allow_single_class: accept one class only.
        head: class names of the checkpoint's head in index order, kept whole where it knows every class of train; then
            other splits may have classes that train lacks and the head knows.
        order: of the classes, as the user listed them; the others follow.

    Raises:
        DataError: a class of another split is missing from train and from a head that is kept, there is only one class
            in train, or a target is too large.
    """
    task = rows_of(kind)
    if not task.has_classes:
        return Labels(task.encode(labels, {}, 1, origins, target), (target,))
    names = class_names([labels[sample] for sample in splits["train"]], kind)
    trained = set(names)
    names = tuple(dict.fromkeys((*(name for name in order if name in trained), *names)))
    whole = kept_head(names, class_names(labels, kind), head)
    _refuse_unseen(labels, task, splits, {*names, *(whole or ())}, origins, target)
    if not names or (len(names) == 1 and task.one_class and not allow_single_class):
        raise DataError(
            f"every label of train is {names[0]!r}" if names else "no sample of train has a label",
            why="there is nothing to tell apart",
            fix="give data with at least two classes, or accept it with data.allow_single_class=true",
        )
    if whole is None:
        absent = [excerpt(name) for name in order if name not in trained]
        left_out = f"label column {listed(absent)} is 1 in no row of train and is left out"
        return Labels(
            task.encode(labels, _numbered(names), len(names), origins, target), names, (left_out,) * bool(absent)
        )
    absent = [excerpt(name) for name in whole if name not in trained]
    notices = () if not absent else (f"the model's head is kept whole; train has no sample of {listed(absent)}",)
    return Labels(task.encode(labels, _numbered(whole), len(whole), origins, target), whole, notices)


def _refuse_unseen(
    labels: Sequence[Any],
    task: TaskRows,
    splits: Mapping[str, NDArray[np.int64]],
    known: Collection[str],
    origins: Origins,
    column: str,
) -> None:
    """Refuse classes of later splits that neither train nor a head that is kept knows."""
    for split, samples in splits.items():
        unknown = {name for sample in samples for name in task.classes_of(labels[sample])}.difference(known)
        if unknown:
            missing = listed([excerpt(name) for name in sorted(unknown)])
            first = next(sample for sample in samples if unknown.intersection(task.classes_of(labels[sample])))
            raise DataError(
                f"{split} has labels that are missing from train: {missing}",
                **place(origins, int(first)),
                column=column,
                why="a model cannot predict a class it never saw in training",
                fix="add training rows of that label, or remove it from the other splits",
            )


def kept_head(trained: Collection[str], found: Collection[str], head: Sequence[str]) -> tuple[str, ...] | None:
    """``names_in_head`` of a head that knows every class found in the data, or at least those of train; None: neither.

    Args:
        trained: classes of the training rows.
        found: classes of all rows.
        head: class names of the checkpoint's head in index order.
    """
    return names_in_head(found, head) or names_in_head(trained, head)


def names_in_head(names: Collection[str], head: Sequence[str]) -> tuple[str, ...] | None:
    """All names of a head in its order, spelled as the data spell them; None where it does not know one of ``names``.

    A head without names of its own knows its ``LABEL_2`` as ``2``, too, but for numbers that may as well be all
    classes of other data: 0 and 1 of a head with three rows.
    """
    rows = rows_by_name(names, head)
    plain: Sequence[str] = head
    if not rows and are_unnamed(head):
        rows, plain = rows_by_number(names, len(head)), [str(row) for row in range(len(head))]
        taken = set(rows.values())
        if len(taken) < len(head) and len(taken) == max(taken, default=0) - min(taken, default=0) + 1:
            return None
    if not rows or len(set(rows.values())) < len(names):
        return None
    named = {row: name for name, row in rows.items()}
    whole = tuple(named.get(row, name) for row, name in enumerate(plain))
    return whole if len(set(whole)) == len(whole) else None


def encode_known_labels(
    labels: Sequence[Any], kind: str, names: Sequence[str], origins: Origins, column: str | None = None
) -> Labels:
    """Labels of a set to evaluate a trained model on, whose classes are ``names``; see ``match_known``.

    Args:
        column: for errors.

    Raises:
        DataError: a label that the model does not know, with its place.
    """
    task = rows_of(kind)
    if not task.has_classes:
        return Labels(task.encode(labels, {}, 1, origins, column), tuple(names))
    distinct = {name for label in labels for name in task.classes_of(label)}
    rows, notices = match_known(distinct, names)
    if unknown := distinct - rows.keys():
        sample = next(at for at, label in enumerate(labels) if unknown.intersection(task.classes_of(label)))
        name = next(name for name in task.classes_of(labels[sample]) if name in unknown)
        raise unknown_label(name, names, column=column, **place(origins, sample))
    return Labels(task.encode(labels, rows, len(names), origins, column), tuple(names), notices)


def match_known(labels: Collection[str], names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the row of each label that a model with the classes ``names`` knows, and notices.

    A label is looked for as it is written, then without regard to case. Then numbers are compared by value: ``0`` is
    ``0.0``; in a model whose classes have no names they are the classes' numbers. In a model of two classes ``true`` is
    1 and ``false`` 0.
    """
    rows = rows_by_name(labels, names)
    plain = [str(row) for row in range(len(names))] if are_unnamed(names) else names
    numbers = rows_by_value(labels, plain) | rows_by_truth(labels, plain)
    by_number = {name: row for name, row in numbers.items() if name not in rows}
    return rows | by_number, (numbered(by_number, names),) if by_number else ()


def unknown_label(name: str, names: Sequence[str], *, column: str | None, fix: str = "", **place: Any) -> DataError:
    """The refusal of a label that a model with the classes ``names`` does not know; ``place`` is its file and line."""
    # digits in common make no numbers alike, and positive is not near negative
    is_number = math.isfinite(number_of(name))
    close = [] if is_number else difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return DataError(
        f"label {excerpt(name)} is unknown to the model",
        **place,
        column=column,
        why=f"did you mean {close[0]!r}?" if close else f"known: {listed(sorted_names(names))}",
        fix=fix or _known_fix(name, names),
    )


def _known_fix(name: str, names: Sequence[str]) -> str:
    """What to write in place of a label that a model does not know."""
    if are_unnamed(names):
        return f"its classes have no names: write their numbers, 0 to {len(names) - 1}"
    has_numbers = any(math.isfinite(number_of(known)) for known in names)
    numbers = {} if has_numbers else rows_by_number([name], len(names))
    if name in numbers:
        return f"write the classes' names; by number {name} would be {excerpt(names[numbers[name]])}"
    return (
        "correct the label, train a model that knows it, or --set data.on_bad_row=skip, which drops and counts such"
        " rows"
    )


def empty_labels(num_samples: int, kind: str, names: Sequence[str]) -> Labels:
    """Zeros in the shape of ``kind``, for samples without labels."""
    return Labels(rows_of(kind).zeros(num_samples, len(names)), tuple(names))


def place(origins: Origins, sample: int) -> dict[str, Any]:
    """``file`` and ``line`` of a sample, as ``DataError`` takes them."""
    line = int(origins.lines[sample])
    return {"file": origins.files[origins.file_index[sample]], "line": line or None}


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: row for row, name in enumerate(names)}
