"""``task.class_weights`` beside torch's weighted mean, and scikit-learn's weights."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch
from paceline.tasks import task_for
from paceline.tasks.class_weights import class_weights
from tests.parity.losses import CLASSES, assert_no_split_matters, assert_same, by_hand, chosen, differ, rare, train

NAMES = ("0", "1", "2")
BALANCED = {"class_weights": "balanced"}
BY_NAME = {"class_weights": {"0": 0.5, "1": 1.0, "2": 4.0}}


def balanced() -> torch.Tensor:
    return torch.tensor(compute_class_weight("balanced", classes=np.arange(CLASSES), y=rare())).float()


def test_balanced_weights_are_scikit_learns() -> None:
    np.testing.assert_allclose(class_weights("balanced", rare(), NAMES), balanced(), rtol=1e-6)


def test_balanced_weights_of_labels_by_themselves_are_absent_over_present() -> None:
    labels = np.zeros((400, 1), np.float32)
    labels[:100] = 1
    assert class_weights("balanced", labels, ("rare",)) == (3.0,), "torch's page on pos_weight: 300 / 100"


@pytest.mark.parametrize("task", [BALANCED, BY_NAME], ids=["balanced", "by name"])
def test_a_run_is_that_of_a_plain_loop_with_torchs_weighted_mean(task: dict[str, object]) -> None:
    weight = balanced() if task is BALANCED else torch.tensor([0.5, 1.0, 4.0])
    found = train(chosen(task=task))
    assert_same(found, by_hand(nn.CrossEntropyLoss(weight=weight)))
    assert differ(found, by_hand(nn.CrossEntropyLoss())), "the weights change nothing"


def test_a_multi_label_run_is_that_of_a_plain_loop_with_pos_weight() -> None:
    labels = rare("multi_label")
    absent, present = (labels == 0).sum(0), (labels == 1).sum(0)
    weight = torch.from_numpy(absent / present).float()
    found = train(chosen(task=BALANCED), "multi_label")
    assert_same(found, by_hand(nn.BCEWithLogitsLoss(pos_weight=weight), "multi_label"))
    assert differ(found, by_hand(nn.BCEWithLogitsLoss(), "multi_label"))


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_no_split_matters(kind: str) -> None:
    assert_no_split_matters(kind, task=BALANCED)


def test_the_loss_of_an_evaluation_is_torchs_weighted_mean() -> None:
    """Over the whole split, whatever its batches; samples of filler do not count."""
    logits, labels = torch.randn(20, 3), torch.from_numpy(rare()[:20])
    meter = task_for("classification", NAMES, TaskPart(), class_weights=balanced().tolist()).meter(torch.device("cpu"))
    weights = torch.ones(20)
    weights[:2] = 0
    for at in (slice(0, 7), slice(7, 20)):
        meter.update(logits[at], Batch({}, labels[at], weights[at]))
    expected = nn.CrossEntropyLoss(weight=balanced())(logits[2:], labels[2:]).item()
    assert meter.compute()["loss"] == pytest.approx(expected, rel=1e-6)


def test_the_mean_of_weighted_means_would_be_another() -> None:
    """What an accumulating loop makes of a weighted mean depends on its pieces; here it must not."""
    criterion = nn.CrossEntropyLoss(weight=balanced())
    assert differ(by_hand(criterion, micro_batch_size=2), by_hand(criterion))


def test_twice_the_weights_are_the_same_weights() -> None:
    double = {"class_weights": {"0": 1.0, "1": 2.0, "2": 8.0}}
    assert_same(train(chosen(task=double)), train(chosen(task=BY_NAME)))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"spam": 1, "hma": 2}, "no label is called 'hma'[\\s\\S]*did you mean 'ham'"),
        ({"spam": 1}, "no weight for label 'ham'[\\s\\S]*task.class_weights.ham=1"),
    ],
)
def test_names_that_are_no_labels_are_refused(wish: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        class_weights(wish, np.array([0, 1]), ("ham", "spam"))
    assert_told(raised.value, message)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 0]), "no training sample has label 'spam'"),
        (np.array([[1.0, 0.0], [1.0, 1.0]]), "every training sample has label 'ham'"),
    ],
)
def test_what_cannot_be_balanced_is_refused(labels: np.ndarray, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        class_weights("balanced", labels, ("ham", "spam"))
    assert_told(raised.value, message)


def assert_told(error: RecipeError, message: str) -> None:
    assert re.search(message, f"{error.what}\n{error.why}\n{error.fix}"), str(error)
