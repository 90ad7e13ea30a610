"""What is said of runs that learned nothing, and not said of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.data.dataset import Dataset, Images, Origins
from paceline.run.learned import LossCourse, no_better_than, nothing_learned


def dataset(train: Any, test: Any, kind: str = "classification") -> Dataset:
    labels = np.concatenate([train, test])
    n = len(labels)
    return Dataset(
        inputs=Images(np.zeros((n, 8, 8, 1), np.uint8)),
        labels=labels,
        kind=kind,
        label_names=("bad", "good") if kind != "regression" else ("value",),
        splits={"train": np.arange(len(train)), "test": np.arange(len(train), n)},
        origins=Origins(("x",), np.zeros(n, np.int32), np.zeros(n, np.int64)),
        fingerprint="f",
    )


def evaluation(confusion: Any = None, **metrics: float) -> dict[str, EvaluationRecord]:
    found = EvaluationRecord(
        split="test", step=9, epoch=0, loss=1.0, metrics=metrics, samples=4, seconds=0.0, confusion=confusion
    )
    return {"test": found}


CLASSES = dataset([0, 1, 1, 1], [0, 0, 1, 1])


def test_one_class_for_all_is_told() -> None:
    told = nothing_learned(evaluation(((2, 0), (2, 0)), accuracy=0.5), CLASSES)
    assert "all 4 predictions on test are 'bad'" in told
    assert "always guessing 'good', the most frequent training label, scores 0.5" in told


def test_a_metric_no_better_than_the_majority_is_told() -> None:
    told = nothing_learned(evaluation(((1, 1), (1, 1)), f1=0.5), CLASSES)
    assert told.startswith("test accuracy 0.5 is no better than always guessing 'good'"), "known from the confusions"
    assert nothing_learned(evaluation(None, accuracy=0.25), CLASSES).startswith("test accuracy 0.25 is no better")


def test_what_was_learned_is_not_told() -> None:
    assert nothing_learned(evaluation(((2, 0), (1, 1)), accuracy=0.75), CLASSES) == ""
    assert nothing_learned({}, CLASSES) == ""
    assert nothing_learned(evaluation(((0, 0), (0, 4)), accuracy=1.0), dataset([1, 1], [1] * 4)) == "", "asked for"


def test_numbers_are_measured_against_their_mean() -> None:
    numbers = dataset(np.array([0.0, 4.0], np.float32), np.array([0.0, 4.0], np.float32), "regression")
    assert nothing_learned(evaluation(mse=4.5), numbers).startswith(
        "test mse 4.5 is no better than always guessing the"
    )
    assert nothing_learned(evaluation(mse=3.5), numbers) == ""


def test_several_labels_are_measured_against_what_is_more_frequent_of_each() -> None:
    many = dataset(
        np.array([[0, 1], [0, 1], [1, 1]], np.float32), np.array([[0, 1], [1, 0]], np.float32), "multi_label"
    )
    assert "which scores 0.5" in nothing_learned(evaluation(accuracy=0.5), many)
    assert nothing_learned(evaluation(accuracy=0.75), many) == ""


def step(number: int, loss: float, *, skipped: bool = False) -> StepRecord:
    return StepRecord(
        step=number, epoch=0, loss=loss, gradient_norm=1.0, learning_rates=(1.0,), samples=1, tokens=1, slots=1,
        correct=0.0, counted=1, skipped=skipped, seconds=0.1, peak_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "told"), [([0.7] * 9 + [70.0] * 9, True), ([0.7, 70.0, *[0.7] * 9], False), ([0.7, 0.9, 2.0] * 3, False)]
)
def test_a_loss_that_rose_by_orders_of_magnitude_is_told(losses: list[float], told: bool) -> None:
    course = LossCourse()
    for number, loss in enumerate(losses):
        course.add(step(number, loss))
    course.add(step(99, float("inf"), skipped=True))
    found = course.rise(())
    assert bool(found) == told, found
    assert not told or found.startswith("the training loss rose from 0.7000 to 70.0")


def test_a_run_that_went_on_is_measured_from_its_beginning() -> None:
    course = LossCourse()
    course.add(step(50, 0.01))
    course.add(step(51, 0.4))
    earlier = evaluation(accuracy=1.0)["test"]
    assert course.rise(()) != ""
    assert course.rise((EvaluationRecord(**{**vars(earlier), "train_metrics": {"loss": 0.7}}),)) == ""


def test_a_baseline_that_is_as_good_is_told() -> None:
    final = evaluation(accuracy=0.8)
    told = no_better_than("words", {"test": {"accuracy": 0.8, "loss": 0.4}}, final, "accuracy")
    assert told == "test accuracy 0.8000 is no better than 0.8000 of words, fitted on the same training texts"
    assert no_better_than("words", {"test": {"accuracy": 0.7, "loss": 0.4}}, final, "accuracy") == ""
    assert no_better_than("words", {"test": {"accuracy": 0.7, "loss": 0.4}}, final, "-loss") != "", "a loss of 1"
    assert no_better_than("words", {}, final, "accuracy") == ""


def test_as_good_as_a_constant_is_no_better() -> None:
    numbers = dataset(np.array([0.0, 4.0], np.float32), np.array([0.0, 4.0], np.float32), "regression")
    assert nothing_learned(evaluation(mse=4.0), numbers).startswith("test mse 4 is no better")
    # a label on half of the samples is guessed to be absent
    halves = dataset(np.array([[0], [1]], np.float32), np.array([[0], [0], [0], [1]], np.float32), "multi_label")
    assert "which scores 0.75" in nothing_learned(evaluation(accuracy=0.5), halves)
    course = LossCourse()
    course.add(step(1, 1.0))
    for number in range(2, 7):
        course.add(step(number, 10.0))
    assert course.rise(()).startswith("the training loss rose from 1.0"), "by this factor"
