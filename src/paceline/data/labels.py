"""From labels as written in the source to the numbers that a loss takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.dataset import Origins
from paceline.errors import DataError, excerpt, nearest


@dataclass(frozen=True)
class Labels:
    """Encoded labels and what their indices mean."""

    values: NDArray[np.int64] | NDArray[np.float32]
    """int64 [n] class indices, float32 [n] targets, or float32 [n, classes] of 0 and 1."""
    names: tuple[str, ...]
    """Class names in index order; one name for regression."""
    notices: tuple[str, ...] = ()


def class_names(labels: Sequence[Any], kind: str) -> tuple[str, ...]:
    """Distinct class names in order: by value where all of them are numbers, otherwise by character."""
    found = {name for label in labels for name in label} if kind == "multi_label" else set(labels)
    values = {name: _number(name) for name in found}
    if all(math.isfinite(value) for value in values.values()):
        return tuple(sorted(found, key=lambda name: (values[name], name)))
    return tuple(sorted(found))


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
        kind: ``classification``, ``multi_label`` or ``regression``.
        splits: sample ids of each split.
        origins: where each sample came from, for errors.
        target: the label's column; the name of a regression's one output.
        allow_single_class: accept one class only.
        head: class names of the checkpoint's head in index order, kept whole where it knows every class of train.
        order: of the classes, as the user listed them; the others follow.

    Raises:
        DataError: a class of another split is missing from train, there is only one class, or a target is too large.
    """
    if kind == "regression":
        return Labels(_targets(labels, origins, target), (target,))
    names = class_names([labels[sample] for sample in splits["train"]], kind)
    listed = tuple(name for name in order if name in names)
    names = (*listed, *(name for name in names if name not in listed))
    whole = names_in_head(names, head)
    known = {*names, *(whole or ())}
    for split, samples in splits.items():
        unknown = set(class_names([labels[sample] for sample in samples], kind)) - known
        if unknown:
            missing = ", ".join(excerpt(name) for name in sorted(unknown)[:10])
            missing += f" and {len(unknown) - 10:,} more" if len(unknown) > 10 else ""
            first = next(sample for sample in samples if unknown & set(_names_of(labels[sample], kind)))
            raise DataError(
                f"{split} has labels that are missing from train: {missing}",
                **place(origins, int(first)),
                column=target,
                why="a model cannot predict a class it never saw in training",
                fix="add training rows of that label, or remove it from the other splits",
            )
    if not names or (len(names) == 1 and kind == "classification" and not allow_single_class):
        raise DataError(
            f"every label of train is {names[0]!r}" if names else "no sample of train has a label",
            why="there is nothing to tell apart",
            fix="give data with at least two classes, or accept it with data.allow_single_class=true",
        )
    if whole is None:
        return Labels(_indices(labels, kind, names), names)
    absent = [name for name in whole if name not in names]
    told = f"train has no sample of {len(absent):,} classes that the model's head knows: " + ", ".join(
        excerpt(name) for name in absent[:10]
    )
    return Labels(_indices(labels, kind, whole), whole, (f"{told}; the head is kept whole",) if absent else ())


def names_in_head(names: Sequence[str], head: Sequence[str]) -> tuple[str, ...] | None:
    """All names of a head in its order, spelled as the data spell them; None where it does not know one of ``names``.

    A name is looked for as it is written, then without regard to case.
    """
    folded = {name.casefold(): index for index, name in enumerate(head)}
    found: dict[int, str] = {}
    for name in names:
        index = head.index(name) if name in head else folded.get(name.casefold())
        if index is None or index in found:
            return None
        found[index] = name
    whole = tuple(found.get(index, name) for index, name in enumerate(head))
    return whole if found and len(set(whole)) == len(whole) else None


def encode_known_labels(
    labels: Sequence[Any], kind: str, names: Sequence[str], origins: Origins, column: str | None = None
) -> Labels:
    """Labels of a set to evaluate a trained model on, whose classes are ``names``; ``column`` is for errors.

    Raises:
        DataError: a label that the model does not know, with its place.
    """
    if kind == "regression":
        return Labels(_targets(labels, origins, column), tuple(names))
    known = set(names)
    for sample, label in enumerate(labels):
        for name in _names_of(label, kind):
            if name not in known:
                raise DataError(
                    f"label {excerpt(name)} is unknown to the model",
                    **place(origins, sample),
                    column=column,
                    why=nearest(name, names),
                    fix="correct the label, or train a model that knows it",
                )
    return Labels(_indices(labels, kind, names), tuple(names))


def empty_labels(num_samples: int, kind: str, names: Sequence[str]) -> Labels:
    """Zeros in the shape of ``kind``, for samples without labels."""
    if kind == "classification":
        return Labels(np.zeros(num_samples, dtype=np.int64), tuple(names))
    shape = (num_samples, len(names)) if kind == "multi_label" else (num_samples,)
    return Labels(np.zeros(shape, dtype=np.float32), tuple(names))


def place(origins: Origins, sample: int) -> dict[str, Any]:
    """``file`` and ``line`` of a sample, as ``DataError`` takes them."""
    line = int(origins.lines[sample])
    return {"file": origins.files[origins.file_index[sample]], "line": line or None}


def _number(name: str) -> float:
    try:
        return float(name)
    except ValueError:
        return math.nan


def _names_of(label: Any, kind: str) -> tuple[str, ...]:
    return tuple(label) if kind == "multi_label" else (label,)


def _indices(labels: Sequence[Any], kind: str, names: Sequence[str]) -> NDArray[np.int64] | NDArray[np.float32]:
    index = {name: position for position, name in enumerate(names)}
    if kind == "classification":
        return np.array([index[label] for label in labels], dtype=np.int64)
    values = np.zeros((len(labels), len(names)), dtype=np.float32)
    for sample, label in enumerate(labels):
        values[sample, [index[name] for name in label]] = 1
    return values


def _targets(labels: Sequence[Any], origins: Origins, column: str | None) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows is reported below, with its place
        values = np.asarray(labels, dtype=np.float64).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise DataError(
            f"target {labels[wrong[0]]!r} is not a finite number in single precision",
            **place(origins, int(wrong[0])),
            column=column,
            fix="correct the row, or scale the targets",
        )
    return values
