"""Where a run is: when its last weights are worse than they were."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest

from paceline.contract.records import EvaluationRecord, LossScaling, Notice, StepRecord
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


def accuracy(value: float, step: int) -> EvaluationRecord:
    return replace(auroc(0.5, step), metrics={"accuracy": value}, notices=())


def test_of_equal_evaluations_the_first_is_the_best() -> None:
    due, at, bests = Due(LoopPart(), 100, "accuracy"), Progress(order=START), []
    for step, value in enumerate((0.5, 0.75, 0.75, 0.5, 0.75), start=1):
        at, is_best = due.judged(replace(at, step=step), accuracy(value, step))
        bests.append(is_best)
    assert bests == [True, True, False, False, False]
    assert (at.best, at.best_step) == (0.75, 2)


def test_a_gain_is_more_than_the_smallest_change() -> None:
    due, at = Due(LoopPart(early_stopping={"patience": 2, "min_delta": 0.25}), 100, "accuracy"), Progress(order=START)
    without_gain = []
    for step, value in enumerate((0.25, 0.5, 0.75, 1.0), start=1):
        at, _ = due.judged(replace(at, step=step), accuracy(value, step))
        without_gain.append(at.evaluations_without_gain)
    # the best moves on all the same, so that the gains of small changes never add up
    assert without_gain == [0, 1, 2, 3]
    assert at.best_step == 4


def test_an_evaluation_begins_the_sums_anew() -> None:
    at = Progress(order=START, step=3, sums=TrainSums(loss=2.0, counted=4, correct=1.0))
    after, _ = Due(LoopPart(), 100, "accuracy").judged(at, accuracy(0.5, 3))
    assert after.sums == TrainSums()


def test_cadences_fall_on_their_bounds() -> None:
    due = Due(LoopPart(checkpoint_every=4, evaluate_every="never", checkpoint_minutes=0.5), 10, "accuracy")
    at = [replace(Progress(order=START), step=step) for step in range(11)]
    assert [p.step for p in at if due.checkpoint(p)] == [4, 8, 10], "the last step, too"
    assert [due.checkpoint_by_clock(seconds) for seconds in (29.9, 30.0)] == [False, True]
    assert [due.ended(p) for p in at[9:]] == [False, True]


def test_nothing_begins_anew_on_resume() -> None:
    """No field at its default: one that was left out would come back as that."""
    evaluated = replace(accuracy(0.5, 3), confusion=((1, 2), (3, 4)), notices=("a",), train_metrics={"loss": 0.5})
    before = Progress(
        order=OrderState(seed=1, epoch=2, step=3, batch_size=4),
        step=13,
        applied=11,
        skipped_in_a_row=2,
        best=0.5,
        best_step=7,
        evaluations_without_gain=3,
        sums=TrainSums(loss=2.0, counted=4, correct=1.0),
        samples=100,
        tokens=900,
        slots=1200,
        evaluations=(evaluated,),
        scaling=LossScaling(lowest=1.0, highest=4.0, last=2.0, skipped=1, counted=9, zero_share=0.25),
    )
    start = Progress(order=START)
    assert not [each.name for each in fields(before) if getattr(before, each.name) == getattr(start, each.name)]
    assert Progress.parse(json.loads(json.dumps(before.plain()))) == before
    judged_anew = before.judged_anew()
    counts = ("best", "best_step", "evaluations_without_gain", "evaluations")
    changed = [each.name for each in fields(before) if getattr(before, each.name) != getattr(judged_anew, each.name)]
    assert tuple(changed) == counts, "what was measured otherwise alone"
    assert all(getattr(judged_anew, name) == getattr(start, name) for name in counts)
