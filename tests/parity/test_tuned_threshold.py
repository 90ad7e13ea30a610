"""``task.threshold: tuned`` beside every other threshold, by scikit-learn's F1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from paceline.contract.errors import RecipeError
from paceline.recipe.parts import TaskPart
from paceline.seams import Alone, Batch, World
from paceline.tasks import task_for
from paceline.tasks.threshold import ThresholdMeter, best_thresholds, by_label
from tests.testing.distributed import run_distributed

CPU = torch.device("cpu")


def made(seed: int, count: int = 60, classes: int = 2, digits: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Scores that say something of rare labels; few ``digits`` make equal ones."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((count, classes)) < 0.2).astype(np.float32)
    scores = np.round(np.clip(0.3 * labels + rng.random((count, classes)) * 0.5, 0, 1), digits)
    return scores.astype(np.float32), labels


def every_f1(scores: np.ndarray, labels: np.ndarray, average: str) -> dict[float, float]:
    """F1 of all predictions that a threshold can make."""
    tried = [0.5, *np.unique(scores).tolist(), -1.0]
    return {t: f1_score(labels, scores > t, average=average, zero_division=0) for t in tried}


@pytest.mark.parametrize("digits", [7, 1])
@pytest.mark.parametrize("seed", range(8))
def test_no_threshold_of_a_label_has_a_better_f1(seed: int, digits: int) -> None:
    scores, labels = made(seed, classes=3, digits=digits)
    for column, found in enumerate(best_thresholds(scores, labels)):
        all_f1 = every_f1(scores[:, column], labels[:, column], "binary")
        ours = f1_score(labels[:, column], scores[:, column] > np.float32(found), zero_division=0)
        assert ours == pytest.approx(max(all_f1.values()))


@pytest.mark.parametrize("digits", [7, 1])
@pytest.mark.parametrize("seed", range(8))
def test_no_threshold_of_two_classes_has_a_better_mean_f1(seed: int, digits: int) -> None:
    scores, labels = made(seed, digits=digits)
    pairs, second = np.stack([1 - scores[:, 0], scores[:, 0]], axis=1), labels[:, 0].astype(np.int64)
    (found,) = best_thresholds(pairs, second)
    ours = f1_score(second, pairs[:, 1] > np.float32(found), average="macro", zero_division=0)
    assert ours == pytest.approx(max(every_f1(pairs[:, 1], second, "macro").values()))


def test_it_is_in_the_middle_and_one_half_where_that_is_as_good() -> None:
    labels = np.array([[0.0], [0.0], [1.0]], np.float32)
    assert best_thresholds(np.array([[0.1], [0.2], [0.4]], np.float32), labels) == (pytest.approx(0.3),)
    assert best_thresholds(np.array([[0.1], [0.4], [0.9]], np.float32), labels) == (0.5,)
    assert best_thresholds(np.array([[0.1], [0.4], [0.9]], np.float32), 0 * labels) == (0.5,), "no label is there"
    assert best_thresholds(np.empty((0, 1), np.float32), labels[:0]) == (0.5,)


def test_neighbours_in_fp32_are_told_apart() -> None:
    low = np.float32(0.3)
    scores = np.array([[low], [np.nextafter(low, np.float32(1))]], np.float32)
    (found,) = best_thresholds(scores, np.array([[0.0], [1.0]], np.float32))
    assert (scores[:, 0] > np.float32(found)).tolist() == [False, True]


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_metrics_are_measured_by_the_thresholds(kind: str) -> None:
    scores, labels = made(1, count=200)
    scores *= 0.7  # so that one half is too high
    logits = torch.from_numpy(np.log(scores.clip(1e-4) / (1 - scores.clip(1e-4)))).float()
    names = ("metrics", "a")
    if kind == "classification":
        logits, target = torch.stack([torch.zeros(200), logits[:, 0]], dim=1), labels[:, 0].astype(np.int64)
    else:
        target = labels
    task = task_for(kind, names, TaskPart(metrics=("f1", "accuracy", "auroc")))
    batch = Batch({}, torch.from_numpy(target), torch.ones(200))
    meter = ThresholdMeter(CPU, task.probabilities)
    meter.update(logits, batch)
    meter.merge(Alone(), [0])
    thresholds = list(meter.compute().values())[1:]

    plain, tuned = task.meter(CPU), task.judged_by(thresholds).meter(CPU)
    for one in (plain, tuned):
        one.update(logits, batch)
    before, after = plain.compute(), tuned.compute()
    probabilities = task.probabilities(logits).numpy()
    if kind == "classification":
        predicted = probabilities[:, 1] > np.float32(thresholds[0])
        assert tuned.confusion() == tuple(
            tuple(int(((target == t) & (predicted == p)).sum()) for p in (0, 1)) for t in (0, 1)
        )
    else:
        predicted = probabilities > np.float32(thresholds)
    assert after["f1"] == pytest.approx(f1_score(target, predicted, average="macro"), abs=1e-6)
    assert after["f1"] > before["f1"]
    assert (after["loss"], after["auroc"]) == (before["loss"], before["auroc"])
    assert list(by_label(task.judged_by(thresholds))) == (["a"] if kind == "classification" else ["metrics", "a"])
    assert task.thresholds == (), "the task itself has changed"


def of_a_share(world: World) -> dict[str, float]:
    scores, labels = made(4, classes=3)
    meter = ThresholdMeter(CPU, lambda logits: logits)
    mine = range(world.rank, 6, world.size)
    for place in mine:
        at = slice(10 * place, 10 * place + 10)
        meter.update(torch.from_numpy(scores[at]), Batch({}, torch.from_numpy(labels[at]), torch.ones(10)))
    meter.merge(world, list(mine))
    return meter.compute() if world.is_first else {}


def test_ranks_find_what_one_finds() -> None:
    alone = of_a_share(Alone())
    assert list(run_distributed(of_a_share, 2)[0].values())[1:] == list(alone.values())[1:]


@pytest.mark.parametrize("threshold", ["tuned", 0.3])
@pytest.mark.parametrize(("kind", "names"), [("classification", ("a", "b", "c")), ("classification", ("a",))])
def test_more_or_fewer_than_two_classes_have_no_threshold(kind: str, names: tuple[str, ...], threshold: object) -> None:
    with pytest.raises(RecipeError, match=f"task.threshold = {threshold}"):
        task_for(kind, names, TaskPart(threshold=threshold))
    assert task_for("multi_label", names, TaskPart(threshold=threshold))
