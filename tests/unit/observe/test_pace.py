import math
from dataclasses import replace

import pytest

from paceline.contract.records import EvaluationRecord, StepRecord
from paceline.observe.pace import WINDOW_STEPS, Evaluations, Pace


def step(number, *, seconds=0.1, loss=1.0, samples=8, tokens=80, slots=100, counted=8, skipped=False):
    return StepRecord(
        step=number,
        epoch=0,
        loss=loss,
        gradient_norm=1.0,
        learning_rates=(1e-3,),
        samples=samples,
        tokens=tokens,
        slots=slots,
        correct=None,
        counted=counted,
        skipped=skipped,
        seconds=seconds,
        peak_bytes=None,
    )


def test_slow_first_steps_do_not_count():
    pace = Pace(0, 100)
    for number in (1, 2):
        pace.add(step(number, seconds=60))
        assert pace.seconds_left is None
        assert pace.samples_per_second is None
    for number in range(3, 11):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(9.0)
    assert pace.samples_per_second == pytest.approx(80)
    assert pace.tokens_per_second == pytest.approx(800)
    assert pace.padding_share == pytest.approx(0.2)


def test_rates_follow_a_change_of_speed():
    pace = Pace(0, 10_000)
    for number in range(1, 1001):
        pace.add(step(number, seconds=0.1))
    for number in range(1001, 1001 + WINDOW_STEPS):
        pace.add(step(number, seconds=10.0))
    assert pace.samples_per_second == pytest.approx(0.8)


def test_a_resumed_run_has_only_the_rest_before_it():
    pace = Pace(90, 100)
    assert pace.step == 90
    for number in range(91, 96):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(0.5)


def test_loss_is_the_mean_per_label_of_recent_finite_steps():
    pace = Pace(0, 10)
    assert math.isnan(pace.loss)
    pace.add(step(1, loss=1.0, counted=1))
    pace.add(step(2, loss=math.nan, counted=5, skipped=True))
    pace.add(step(3, loss=4.0, counted=3))
    assert pace.loss == pytest.approx(13 / 4)
    assert pace.num_skipped == 1


def test_images_have_neither_tokens_nor_padding():
    pace = Pace(0, 10)
    for number in range(1, 6):
        pace.add(step(number, tokens=8, slots=8))
    assert pace.tokens_per_second is None
    assert pace.padding_share is None
    assert pace.samples_per_second == pytest.approx(80)


def evaluation(step: int, *, seconds: float = 2.0, samples: int = 20) -> EvaluationRecord:
    return EvaluationRecord(
        split="validation", step=step, epoch=0, loss=1.0, metrics={}, samples=samples, seconds=seconds
    )


@pytest.mark.parametrize(
    ("every", "step", "evaluated", "passes"),
    [
        (10, 3, 0, 4),  # of steps 10, 20, 30 and 35
        (10, 10, 0, 4),  # the one of step 10 follows it
        (10, 10, 10, 3),
        (10, 31, 30, 1),
        (35, 3, 0, 1),
        (0, 3, 0, 1),
    ],
)
def test_evaluations_to_come(every: int, step: int, evaluated: int, passes: int) -> None:
    with_test = Evaluations(every=every, validation=20, at_end=5)
    assert with_test.ahead(step, 35, evaluated) == (passes + 1, 20 * passes + 5)
    assert Evaluations(every=every, at_end=5).ahead(step, 35, evaluated) == (1, 5)
    assert Evaluations(every=every, validation=20).ahead(step, 35, evaluated) == (passes, 20 * passes)


def test_the_time_left_has_the_evaluations_to_come_once_one_is_measured() -> None:
    """Seen: 4 minutes left, and 6 it took."""
    pace = Pace(0, 30, Evaluations(every=10, validation=20, at_end=10))
    for number in range(1, 11):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(2.0)
    assert pace.evaluations_not_counted == 4, "not known, and said to be left out"
    pace.add_evaluation(evaluation(10))
    for number in range(11, 13):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(1.8 + 2 * 2.0 + 1.0)
    assert pace.evaluations_not_counted == 0


def test_evaluations_are_those_of_the_recipe(records) -> None:
    loop = {"loop": {"evaluate_every": "epoch"}, "task": {"threshold": 0.5}}
    started = records.started(recipe=loop, samples={"train": 80, "validation": 20, "test": 10}, steps_per_epoch=10)
    assert Evaluations.of(started) == Evaluations(every=10, validation=20, at_end=10)
    often = replace(started, recipe={"loop": {"evaluate_every": 3}})
    assert Evaluations.of(often).every == 3
    never = replace(started, recipe={"loop": {"evaluate_every": "never"}, "task": {"threshold": "tuned"}})
    assert Evaluations.of(never) == Evaluations(every=0, validation=20, at_end=50)
