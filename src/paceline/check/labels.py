"""Labels are numbered as in the checkpoint, and as in what is saved."""

from __future__ import annotations

import numpy as np

from paceline.check.claim import Broken, NotApplicable
from paceline.check.subject import Subject
from paceline.contract.label_names import are_unnamed
from paceline.data.task_rows import rows_of
from paceline.models.config import checkpoint_labels, read_config
from paceline.models.heads import head_of


def check(subject: Subject) -> str:
    """The head of the checkpoint, the data set and the model's configuration name the same rows alike."""
    dataset, names = subject.dataset, subject.dataset.label_names
    if not rows_of(dataset.kind).has_classes:
        raise NotApplicable(f"the label {names[0]} is a number, and has no classes")
    _in_range(subject)
    told = [f"{len(names)} classes, {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"]
    part = subject.recipe.model
    config = read_config(part)
    own = getattr(getattr(subject.pristine, "config", None), "id2label", None)
    if own is not None:
        written = tuple(str(own[row]) for row in sorted(own))
        _same("the model's id2label", written, head_of(dataset.kind).outputs(names))
        told.append("as in the model's id2label")
    head = checkpoint_labels(part, config)
    if not head or are_unnamed(head):
        told.append("the checkpoint names none")
    elif {name.casefold() for name in head} == {name.casefold() for name in names}:
        _same("the checkpoint's head", tuple(map(str.casefold, head)), tuple(map(str.casefold, names)))
        told.append("in the order of the checkpoint's head")
    else:
        told.append("the checkpoint's head is for other classes, and is new")
    return "; ".join(told)


def _in_range(subject: Subject) -> None:
    labels, names = np.asarray(subject.dataset.labels), subject.dataset.label_names
    if not rows_of(subject.dataset.kind).one_class:
        if labels.shape[1] != len(names) or not np.isin(labels, (0, 1)).all():
            raise Broken(f"labels of shape {labels.shape} are not a 0 or 1 for each of {len(names)} names")
        return
    if labels.min() < 0 or labels.max() >= len(names) or len(set(names)) != len(names):
        raise Broken(f"labels from {labels.min()} to {labels.max()} for {len(names)} names")


def _same(where: str, found: tuple[str, ...], names: tuple[str, ...]) -> None:
    for row, (one, other) in enumerate(zip(found, names, strict=False)):
        if one != other:
            raise Broken(f"row {row} is {one} in {where}, and {other} in the data", tensor=f"label {row}")
    if len(found) != len(names):
        raise Broken(f"{where} has {len(found)} labels, and the data {len(names)}")
