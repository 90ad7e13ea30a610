"""``observe.baseline: tfidf``: what words alone say of the labels, measured like the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.contract.errors import DataError, RecipeError
from paceline.data.dataset import Dataset
from paceline.data.labels import encode_known_labels
from paceline.data.task_rows import rows_of
from paceline.machine.facts import beyond_main_memory
from paceline.recipe.parts import DataPart
from paceline.seams import Alone, Batch, Task

NAME = "TF-IDF and logistic regression"

_CPU = torch.device("cpu")
_CERTAIN = 1e-7
"""Probabilities are kept this far from 0 and 1, as their logarithms are taken."""


def check_baseline(dataset: Dataset, *, has_texts: bool) -> None:
    """Refuse, before the first step, a baseline that cannot be fitted to these data.

    Raises:
        RecipeError: they are no texts, have no classes, or too many for the main memory.
    """
    why = "" if rows_of(dataset.kind).has_classes else "it is for classes"
    why = why if has_texts else "it is fitted on texts"
    num_samples = max((len(ids) for split, ids in dataset.splits.items() if split != "train"), default=0)
    # probabilities in fp64, and their logarithms
    why = why or beyond_main_memory(16 * num_samples * len(dataset.label_names))
    if why:
        raise RecipeError("observe.baseline = tfidf: cannot be fitted to these data", why, "leave it out")


def measure_baseline(
    part: DataPart, dataset: Dataset, task: Task, splits: Sequence[str], rows: object | None = None
) -> Mapping[str, Mapping[str, float]]:
    """Loss and the task's metrics by split, of TF-IDF and logistic regression fitted on the training texts.

    Args:
        part: where the texts are read from once more: a cached data set has tokens alone.
        dataset: the labels and splits of the run.
        splits: those to measure.
        rows: data in memory in place of the source.

    Raises:
        DataError: the texts are no longer what they were.
        ValueError: scikit-learn's, where no word is left to fit.
    """
    texts = _texts(part, dataset, rows)
    train = dataset.splits["train"]
    model = _model(several=dataset.labels.ndim == 2)
    found: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings(action="ignore"):  # of a fit cut short, and of labels that all samples have or none
        model.fit([texts[i] for i in train], dataset.labels[train].astype(np.int64))
        for split in splits:
            ids = dataset.splits[split]
            probabilities = model.predict_proba([texts[i] for i in ids])
            likely = _likely(probabilities, model, dataset)
            found[split] = _measured(task, task.logits(likely).float(), dataset.labels[ids])
    return found


def _model(*, several: bool) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    classifier = LogisticRegression(max_iter=1000)
    return make_pipeline(
        TfidfVectorizer(sublinear_tf=True),
        OneVsRestClassifier(classifier) if several else classifier,
    )


def _texts(part: DataPart, dataset: Dataset, rows: object | None) -> Sequence[str]:
    """The text of each sample, both texts of a pair in one."""
    from paceline.data.sources import read

    table = read(part, task=dataset.kind, rows=rows, head=dataset.label_names, modality="text")
    changed = DataError("the data have changed since the run began", fix="give data that can be read twice")
    if table.texts is None or table.labels is None or len(table) != len(dataset):
        raise changed
    target = table.columns.get("label")
    labels = encode_known_labels(table.labels, dataset.kind, dataset.label_names, table.origins, target)
    if not np.array_equal(labels.values, dataset.labels):
        raise changed
    if table.pairs is None:
        return table.texts
    return [f"{text}\n{other}" for text, other in zip(table.texts, table.pairs, strict=True)]


def _likely(probabilities: NDArray[np.float64], model: Any, dataset: Dataset) -> torch.Tensor:
    """fp64 [n, C]: probabilities of all labels; classes without a training sample have none."""
    if dataset.labels.ndim == 2:
        return torch.from_numpy(np.clip(probabilities, _CERTAIN, 1 - _CERTAIN))
    every = np.zeros((len(probabilities), len(dataset.label_names)))
    every[:, model.classes_] = probabilities
    return torch.from_numpy(np.clip(every, _CERTAIN, 1))


def _measured(task: Task, logits: torch.Tensor, labels: NDArray[Any]) -> dict[str, float]:
    meter = task.meter(_CPU)
    meter.update(logits, Batch({}, torch.from_numpy(np.array(labels)), torch.ones(len(labels))))
    meter.merge(Alone(), [0])
    return meter.compute()
