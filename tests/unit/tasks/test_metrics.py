"""Every metric of every kind of task compared with scikit-learn and scipy, and what is said where one is undefined."""

import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from sklearn import metrics as sk

from paceline.recipe.parts import TaskPart
from paceline.seams import Alone, Batch
from paceline.tasks import task_for
from paceline.tasks.classification.meter import KNOWN as OF_CLASSES
from paceline.tasks.multi_label.meter import KNOWN as OF_LABELS
from paceline.tasks.regression.meter import KNOWN as OF_NUMBERS
from tests.unit.tasks.ranks import on_ranks

KNOWN = {"classification": OF_CLASSES, "multi_label": OF_LABELS, "regression": OF_NUMBERS}

Scores = NDArray[np.float32]
Reference = Callable[[Scores, NDArray[np.generic]], float]
"""(scores, labels) -> what the metric is, nan where it is undefined."""

NAMES = ("a", "b", "c", "d")


def likeliest(scores: Scores) -> NDArray[np.int64]:
    return scores.argmax(1)


def area(labels: NDArray[np.bool_], scores: Scores) -> float:
    return float(sk.roc_auc_score(labels, scores)) if len(set(labels.tolist())) == 2 else math.nan


def mean(areas: list[float]) -> float:
    return float(np.nanmean(areas)) if not np.isnan(areas).all() else math.nan


def macro(metric: Callable[..., float], predicted: Callable[[Scores], NDArray[np.generic]]) -> Reference:
    return lambda scores, labels: float(metric(labels, predicted(scores), average="macro", zero_division=0))


CLASSIFICATION: Mapping[str, Reference] = {
    "accuracy": lambda scores, labels: float(sk.accuracy_score(labels, likeliest(scores))),
    "f1": macro(sk.f1_score, likeliest),
    "precision": macro(sk.precision_score, likeliest),
    "recall": macro(sk.recall_score, likeliest),
    "mcc": lambda scores, labels: float(sk.matthews_corrcoef(labels, likeliest(scores))),
    "auroc": lambda scores, labels: mean([area(labels == c, scores[:, c]) for c in range(scores.shape[1])]),
}


def probable(scores: Scores) -> NDArray[np.int64]:
    return (scores > 0.5).astype(np.int64)


MULTI_LABEL: Mapping[str, Reference] = {
    "accuracy": lambda scores, labels: float((probable(scores) == labels).mean()),
    "exact_match": lambda scores, labels: float(sk.accuracy_score(labels, probable(scores))),
    "f1": macro(sk.f1_score, probable),
    "precision": macro(sk.precision_score, probable),
    "recall": macro(sk.recall_score, probable),
    "auroc": lambda scores, labels: mean([area(labels[:, c] > 0, scores[:, c]) for c in range(scores.shape[1])]),
}


def correlated(metric: Callable[..., tuple[float, float]]) -> Reference:
    def value(scores: Scores, labels: NDArray[np.generic]) -> float:
        return float(metric(scores.astype(float), labels.astype(float))[0]) if len(labels) > 1 else math.nan

    return value


def explained(scores: Scores, labels: NDArray[np.generic]) -> float:
    return float(sk.r2_score(labels.astype(float), scores)) if len(set(labels.tolist())) > 1 else math.nan


REGRESSION: Mapping[str, Reference] = {
    "mse": lambda scores, labels: float(sk.mean_squared_error(labels, scores)),
    "mae": lambda scores, labels: float(sk.mean_absolute_error(labels, scores)),
    "r2": explained,
    "pearson": correlated(scipy.stats.pearsonr),
    "spearman": correlated(scipy.stats.spearmanr),
}

REFERENCES = {"classification": CLASSIFICATION, "multi_label": MULTI_LABEL, "regression": REGRESSION}

SHAPES = ("plain", "ties", "absent", "constant labels", "constant predictions", "far from 0", "tiny", "one sample")
"""Forms of data with which metrics went wrong somewhere: a class that never occurs, nothing to tell apart, ..."""


def data(kind: str, shape: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of one form."""
    draw = np.random.default_rng([seed, SHAPES.index(shape)])
    count, classes = (1 if shape == "one sample" else int(draw.integers(5, 80))), 1 if kind == "regression" else 4
    logits = draw.normal(size=(count, classes)).astype(np.float32)
    if shape == "ties":
        logits = logits.round()
    if shape == "constant predictions":
        logits[:] = logits[0]
    if kind == "classification":
        labels = draw.integers(0, {"absent": 3, "constant labels": 1}.get(shape, 4), count)
    elif kind == "multi_label":
        labels = (draw.random((count, 4)) > 0.6).astype(np.float32)
        labels[:, 3] = {"absent": 0, "constant labels": 1}.get(shape, labels[:, 3])
        labels = labels if shape != "constant labels" else np.ones_like(labels)
    else:
        labels = (logits[:, 0] + draw.normal(size=count)).astype(np.float32)
        labels = labels.round() if shape == "ties" else np.ones_like(labels) if shape == "constant labels" else labels
        factor, offset = {"far from 0": (1.0, 2000.0), "tiny": (1e-4, 0.0)}.get(shape, (1.0, 0.0))
        logits, labels = (each * np.float32(factor) + np.float32(offset) for each in (logits, labels))
    return torch.from_numpy(logits), torch.from_numpy(labels)


def names_of(kind: str) -> tuple[str, ...]:
    return ("y",) if kind == "regression" else NAMES


def with_filler(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits, torch.full_like(logits[:2], 50.0)])


def measure(
    kind: str, logits: torch.Tensor, labels: torch.Tensor, metrics: tuple[str, ...] = (), size: int = 7, world=None
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Values and notices, of batches of ``size`` that end with filler."""
    world = world or Alone()
    meter = task_for(kind, names_of(kind), TaskPart(metrics=metrics or KNOWN[kind])).meter(torch.device("cpu"))
    places = range(world.rank, -(-len(labels) // size), world.size)
    for place in places:
        some, theirs = (each[place * size : (place + 1) * size] for each in (logits, labels))
        weights = torch.tensor([1.0] * len(some) + [0.0] * len(theirs[:2]))
        meter.update(with_filler(some), Batch({}, torch.cat([theirs, theirs[:2]]), weights))
    meter.merge(world, list(places))
    return (meter.compute(), meter.notices()) if world.is_first else ({}, ())


def scored(kind: str, logits: torch.Tensor) -> Scores:
    """Probabilities, or values: as a batch with filler has them, for the last bits depend on its size."""
    whole = with_filler(logits)
    scores = {"classification": whole.softmax(-1), "multi_label": whole.sigmoid(), "regression": whole[:, 0]}
    values: Scores = scores[kind][: len(logits)].numpy()
    return values


def test_every_metric_has_a_reference_here() -> None:
    assert {kind: set(names) for kind, names in KNOWN.items()} == {
        kind: set(references) for kind, references in REFERENCES.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", REFERENCES)
def test_values_are_those_of_scikit_learn_and_scipy(kind: str, shape: str) -> None:
    for seed in range(5):
        logits, labels = data(kind, shape, seed)
        found, notices = measure(kind, logits, labels, size=len(labels))
        for name, reference in REFERENCES[kind].items():
            with warnings.catch_warnings(action="ignore"):  # theirs, of what is undefined
                expected = reference(scored(kind, logits), labels.numpy())
            assert found[name] == pytest.approx(expected, rel=2e-5, abs=2e-6, nan_ok=True), (name, seed)
            if math.isnan(expected):
                assert [notice for notice in notices if name in notice and "undefined (NaN)" in notice], name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", REFERENCES)
def test_ranks_and_batches_change_no_bit(kind: str, shape: str) -> None:
    logits, labels = data(kind, shape, 0)
    alone = measure(kind, logits, labels)
    found = on_ranks(3, lambda world: measure(kind, logits, labels, world=world))
    assert repr(found[0]) == repr(alone), "NaN is no equal of itself"


@pytest.mark.parametrize("kind", REFERENCES)
def test_data_that_define_every_metric_get_no_notice(kind: str) -> None:
    logits, labels = data(kind, "plain", 1)
    if kind != "regression":
        logits = torch.cat([logits, 9 * torch.eye(4), -9 * torch.eye(4)])
        ones = torch.arange(4).repeat(2) if kind == "classification" else torch.cat([torch.eye(4), 1 - torch.eye(4)])
        labels = torch.cat([labels, ones])
    found, notices = measure(kind, logits, labels)
    assert not notices
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    ("kind", "shape", "metric", "value", "notice"),
    [
        ("classification", "absent", "auroc", None, "auroc: the mean over 3 of 4 classes, without 'd', which no"),
        ("multi_label", "absent", "auroc", None, "auroc: the mean over 3 of 4 classes, without 'd', which no"),
        ("multi_label", "absent", "f1", None, "f1: 'd' counted as 0, as in scikit-learn: no sample has it"),
        ("classification", "constant labels", "auroc", math.nan, "auroc: undefined (NaN): all samples are of one"),
        ("multi_label", "constant labels", "auroc", math.nan, "auroc: undefined (NaN): each label is on all samples"),
        ("classification", "constant predictions", "mcc", 0.0, "mcc: 0, as in scikit-learn: all predictions are of"),
        ("classification", "constant predictions", "precision", None, "precision: a class that is never predicted is"),
        ("regression", "constant labels", "r2", math.nan, "r2: undefined (NaN): all labels are equal"),
        ("regression", "constant predictions", "spearman", math.nan, "spearman: undefined (NaN): all predictions are"),
        ("regression", "one sample", "pearson", math.nan, "pearson: undefined (NaN): there is one sample"),
    ],
)
def test_what_a_value_leaves_out_is_said(kind: str, shape: str, metric: str, value: float | None, notice: str) -> None:
    found, notices = measure(kind, *data(kind, shape, 0), (metric,))
    assert [each[: len(notice)] for each in notices] == [notice]
    if value is not None:
        assert found[metric] == pytest.approx(value, nan_ok=True)


def test_metrics_with_one_reason_share_a_notice() -> None:
    _, notices = measure("regression", *data("regression", "constant labels", 0))
    assert notices == ("r2, pearson, spearman: undefined (NaN): all labels are equal",)


def test_a_perfect_ranking_of_the_classes_that_occur_is_perfect() -> None:
    labels = torch.tensor([0, 1, 0, 1, 2, 2])
    found, _ = measure("classification", 5 * torch.eye(4)[labels], labels, ("auroc",))
    assert found["auroc"] == 1.0


def test_predictions_that_differ_by_rounding_alone_are_equal() -> None:
    logits = torch.full((40, 1), 0.3)
    logits[::3] = torch.nextafter(logits[0], torch.ones(1))
    found, _ = measure("regression", logits, torch.randn(40), ("pearson", "spearman"))
    assert math.isnan(found["pearson"])
    assert math.isnan(found["spearman"])


@pytest.mark.parametrize("kind", REFERENCES)
def test_no_metric_is_a_figure_where_the_model_gives_nan(kind: str) -> None:
    logits, labels = data(kind, "plain", 2)
    logits[3, 0] = math.nan
    found, notices = measure(kind, logits, labels)
    assert all(math.isnan(found[name]) for name in KNOWN[kind])
    assert notices == (f"{', '.join(KNOWN[kind])}: undefined (NaN): the model's outputs have NaN among them",)


@pytest.mark.parametrize("kind", REFERENCES)
def test_no_metric_is_a_figure_of_no_samples(kind: str) -> None:
    found, _ = measure(kind, *(each[:0] for each in data(kind, "plain", 0)))
    assert all(math.isnan(value) for value in found.values())


def test_no_warning_of_a_library_is_swallowed_or_raised() -> None:
    with warnings.catch_warnings(action="error"):
        for kind in REFERENCES:
            for shape in SHAPES:
                measure(kind, *data(kind, shape, 0))


def test_many_ties_and_many_classes_fit_into_whole_numbers_and_memory() -> None:
    """The ranks of 100,000 equal values add up to more than 32 bits; pairs of 20,000 classes would take 3 GiB."""
    labels = torch.arange(100_000) % 2
    found, _ = measure("regression", (labels[:, None] == 0).float(), labels.float(), ("spearman",), size=50_000)
    assert found["spearman"] == pytest.approx(-1.0)
    names = tuple(f"{c}" for c in range(20_000))
    meter = task_for("classification", names, TaskPart(metrics=("accuracy", "f1", "mcc"))).meter(torch.device("cpu"))
    meter.update(torch.eye(3, 20_000), Batch({}, torch.tensor([0, 1, 5]), torch.ones(3)))
    assert meter.compute()["accuracy"] == pytest.approx(2 / 3)
