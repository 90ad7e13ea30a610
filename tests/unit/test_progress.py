"""Where a run is: when its last weights are worse than they were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.contract.records import EvaluationRecord, Notice, StepRecord
from paceline.data.order import OrderState
from paceline.recipe.parts import LoopPart
from paceline.run.due import Due
from paceline.run.emitter import Emitter
from paceline.run.progress import Progress, TrainSums

START = OrderState(seed=0, epoch=0, step=0, batch_size=8)


def progress(metric: str, best: float, *values: float) -> Progress:
    """Evaluations every ten steps, ``best`` at the first."""
    metrics = [{"loss": value} if metric == "-loss" else {"loss": 1.0, metric: value} for value in values]
    found = [
        EvaluationRecord(
            split="validation", step=10 * (i + 1), epoch=i, samples=4, seconds=0.1, loss=m["loss"], metrics=m
        )
        for i, m in enumerate(metrics)
    ]
    return Progress(order=START, step=10 * len(values), best=best, best_step=10, evaluations=tuple(found))


@pytest.mark.parametrize(
    ("metric", "best", "newest", "told"),
    [
        ("accuracy", 0.8884, 0.5, "validation accuracy went from 0.8884 at step 10 to 0.5 at step 20"),
        ("accuracy", 0.8884, 0.8352, ""),
        ("accuracy", 0.8884, 0.8884, ""),
        ("accuracy", 0.8884, math.nan, "validation accuracy went from 0.8884 at step 10 to nan at step 20"),
        ("-loss", -0.25, 0.69, "validation loss went from 0.25 at step 10 to 0.69 at step 20"),
        ("-loss", -0.25, 0.27, ""),
    ],
)
def test_a_sharp_fall_is_told(metric: str, best: float, newest: float, told: str) -> None:
    assert progress(metric, best, abs(best), newest).fall(metric) == told


def test_a_skipped_step_adds_nothing_to_the_sums() -> None:
    sizes = {"samples": 4, "tokens": 9, "slots": 12, "correct": 3.0, "counted": 4}
    others = {"step": 1, "epoch": 0, "gradient_norm": 1.0, "learning_rates": (), "seconds": 0.1, "peak_bytes": None}
    step = StepRecord(loss=2.0, skipped=False, **sizes, **others)
    sums = TrainSums().plus(step).plus(replace(step, loss=math.inf, skipped=True)).plus(replace(step, loss=1.0))
    assert sums == TrainSums(loss=12.0, counted=8, correct=6.0)


def test_without_an_evaluation_nothing_fell() -> None:
    assert Progress(order=START).fall("accuracy") == ""


def auroc(value: float, step: int) -> EvaluationRecord:
    named = {"metrics": {"auroc": value}, "notices": ("auroc: undefined (NaN): all samples are of one class",)}
    return EvaluationRecord(split="validation", step=step, epoch=0, samples=4, seconds=0.1, loss=1.0, **named)


def test_nan_is_never_the_best_and_early_stopping_does_not_count_it() -> None:
    due = Due(LoopPart(early_stopping={"patience": 2}), 100, "auroc")
    at, bests = Progress(order=START), []
    for step, value in enumerate((math.nan, math.nan, 0.7, math.nan, math.nan, 0.6, math.nan), start=1):
        at, is_best = due.judged(replace(at, step=step), auroc(value, step))
        bests.append(is_best)
        assert not due.stopped_early(at)
    assert bests == [False, False, True, False, False, False, False]
    assert (at.best, at.best_step, at.evaluations_without_gain) == (0.7, 3, 1)
    assert "loop.best_metric = auroc is NaN" in due.notice(auroc(math.nan, 1))
    assert due.notice(auroc(0.5, 1)) == ""
    assert due.stopped_early(due.judged(replace(at, step=8), auroc(0.7, 8))[0]), "two evaluations without a gain"


def test_a_notice_of_an_evaluation_is_passed_on_once_a_run() -> None:
    records: list[object] = []

    class Kept:
        def observe(self, record: object) -> None:
            records.append(record)

        def close(self) -> None: ...

    emitter = Emitter()
    emitter.pass_on_to([Kept()])
    for step in (1, 2):
        emitter.emit(auroc(math.nan, step))
    told = [record.message for record in records if isinstance(record, Notice)]
    assert told == ["validation: auroc: undefined (NaN): all samples are of one class"] == emitter.notices
