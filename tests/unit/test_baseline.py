"""TF-IDF and logistic regression on a run's own splits, by the run's own metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.contract.errors import DataError, RecipeError
from paceline.data.dataset import Dataset, Origins, Tokens
from paceline.recipe.parts import DataPart, TaskPart
from paceline.run.baseline import check_baseline, measure_baseline
from paceline.tasks import task_for

TEXTS = [f"{word} film {n}" for n in range(8) for word in ("dull", "lovely", "short")]


def dataset(labels: Any, kind: str, names: tuple[str, ...]) -> Dataset:
    n = len(TEXTS)
    order = np.arange(n)
    return Dataset(
        inputs=Tokens(np.zeros(n, np.uint16), np.arange(n + 1), 0),
        labels=labels,
        kind=kind,
        label_names=names,
        splits={"train": order[:18], "test": order[18:]},
        origins=Origins(("memory",), np.zeros(n, np.int32), order),
        fingerprint="f",
    )


def measured(found: Dataset, rows: list[dict[str, Any]]) -> dict[str, float]:
    task = task_for(found.kind, found.label_names, TaskPart())
    return dict(measure_baseline(DataPart(text="text", label="label"), found, task, ("test",), rows)["test"])


def test_classes_that_words_tell() -> None:
    names = ("dull", "lovely", "never trained on", "short")
    labels = np.array([0, 1, 3] * 8)
    labels[-1] = 2  # of the test split alone
    rows = [{"text": text, "label": names[label]} for text, label in zip(TEXTS, labels, strict=True)]
    found = measured(dataset(labels, "classification", names), rows)
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert np.isfinite(found["loss"])


def test_several_labels_a_text() -> None:
    labels = np.array([[1, 0], [0, 1], [1, 1]] * 8, np.float32)
    rows = [{"text": text, "label": [["a"], ["b"], ["a", "b"]][n % 3]} for n, text in enumerate(TEXTS)]
    found = measured(dataset(labels, "multi_label", ("a", "b")), rows)
    assert found["accuracy"] == 1
    assert found["f1"] == 1


def test_other_data_than_the_runs_are_refused() -> None:
    labels = np.array([0, 1, 1] * 8)
    found = dataset(labels, "classification", ("dull", "other"))
    rows = [{"text": text, "label": ("dull", "other")[label]} for text, label in zip(TEXTS, labels, strict=True)]
    assert measured(found, rows)["accuracy"] == 1
    for changed in (rows[:-1], [*rows[:-1], {"text": "x", "label": "dull"}]):
        with pytest.raises(DataError, match="have changed since the run began"):
            measured(found, changed)


def test_what_has_no_texts_or_no_classes_is_refused() -> None:
    classes = dataset(np.array([0, 1, 1] * 8), "classification", ("a", "b"))
    check_baseline(classes, has_texts=True)
    with pytest.raises(RecipeError, match="fitted on texts"):
        check_baseline(classes, has_texts=False)
    with pytest.raises(RecipeError, match="for classes"):
        check_baseline(dataset(np.zeros(24, np.float32), "regression", ("v",)), has_texts=True)
